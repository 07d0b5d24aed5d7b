"""Whatever dies: one line out for each line in. The two first tests are those that other batch servers fail."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shutil
import signal
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import openai
import pytest

from gateway.batches.drivers import STALE_S
from gateway.batches.log import BatchLog
from shared.batch_streams import batch_stream
from shared.direct_client import DirectClient
from shared.messages import BatchResult, Request
from shared.streams import RESULTS_STREAM
from tests.gateway.batches.conftest import EchoWorker, Place, echo, echo_worker
from tests.gateway.batches.test_batches import ended, jsonl, line, lines_of, submitted
from tests.gateway.gateway_process import GatewayProcess
from tests.servers import NatsServer
from tests.waiting import until


def slow_and_dying(worker: EchoWorker, pause_s: float) -> None:
    """Have a worker take its time, and leave every fifth job to a later delivery, as one does that is killed."""
    lost: set[str] = set()

    def answer(request: Request) -> BatchResult | None:
        if len(worker.computed) % 5 == 4 and request.id not in lost:
            lost.add(request.id)
            return None
        return echo(request)

    worker.answer, worker.pause_s = answer, pause_s


def quick(worker: EchoWorker) -> None:
    worker.answer, worker.pause_s = echo, 0.0


async def assert_each_line_once(client: openai.AsyncOpenAI, batch_id: str, num_lines: int, timeout_s: float) -> None:
    batch = await ended(client, await client.batches.retrieve(batch_id), timeout_s)
    assert batch.status == "completed", batch
    output = [*await lines_of(client, batch.output_file_id), *await lines_of(client, batch.error_file_id)]
    told = {each["custom_id"]: each["response"]["body"]["choices"][0]["message"]["content"] for each in output}
    assert len(output) == num_lines
    assert told == {f"line-{number}": f"text {number}" for number in range(num_lines)}
    assert batch.request_counts is not None
    assert (batch.request_counts.total, batch.request_counts.completed) == (num_lines, num_lines)


def killed(gateway: GatewayProcess) -> None:
    gateway.process.kill()
    gateway.process.wait()


@dataclass(frozen=True)
class Begun:
    """A batch that the first of two gateways drives."""

    place: Place
    worker: EchoWorker
    first: GatewayProcess
    second: GatewayProcess
    batch_id: str

    async def is_taken_over(self) -> None:
        await until(lambda: "driving a batch" in self.second.log)

    async def ends_at_the_second(self) -> None:
        quick(self.worker)
        async with self.place.client(self.second) as client:
            await assert_each_line_once(client, self.batch_id, 64, 30)


@contextlib.asynccontextmanager
async def begun(own: tuple[Place, EchoWorker], num_computed: int = 10) -> AsyncIterator[Begun]:
    """Begin a batch of 64 lines at the first of two gateways, and go on when some are computed."""
    place, worker = own
    slow_and_dying(worker, 1 / 20)
    with place.gateway("first") as first, place.gateway("second") as second:
        async with place.client(first) as client:
            batch = await submitted(client, jsonl([line(number, "m") for number in range(64)]))
            await until(lambda: len(worker.computed) > num_computed)
        yield Begun(place, worker, first, second, batch.id)


async def test_all_64_jobs_survive_a_hard_kill_of_their_driver(own: tuple[Place, EchoWorker]) -> None:
    async with begun(own, 20) as batch:
        killed(batch.first)
        await batch.is_taken_over()
        await batch.ends_at_the_second()


async def test_two_gateways_drive_64_of_64_exactly_once(own: tuple[Place, EchoWorker]) -> None:
    place, worker = own
    with place.gateway("first") as first, place.gateway("second") as second:
        async with place.client(first) as one, place.client(second) as other:
            batches = [
                await submitted(client, jsonl([line(number, "m") for number in range(64)]))
                for client in (one, other, one)
            ]
            for batch in batches:
                await assert_each_line_once(other, batch.id, 64, 30)
    assert len(worker.computed) == len(set(worker.computed)) == 3 * 64


async def test_batch_goes_on_after_nats_and_its_only_gateway_were_killed(
    start_nats: Callable[..., NatsServer], tmp_path: Path
) -> None:
    nats = start_nats()
    place = Place(nats.url, tmp_path, {})
    async with echo_worker(place.nats_url) as worker:
        slow_and_dying(worker, 1 / 40)
        with place.gateway("first") as first:
            async with place.client(first) as client:
                batch = await submitted(client, jsonl([line(number, "m") for number in range(64)]))
                await until(lambda: len(worker.computed) > 20)
                nats.kill()
                await asyncio.sleep(0.5)
                nats.start()
                await until(lambda: len(worker.computed) > 40, 20)
            killed(first)
        with place.gateway("second") as second:
            quick(worker)
            async with place.client(second) as client:
                await assert_each_line_once(client, batch.id, 64, 40)


async def test_gateway_that_is_stopped_leaves_its_batch_to_another_at_once(own: tuple[Place, EchoWorker]) -> None:
    async with begun(own) as batch:
        assert await asyncio.to_thread(batch.first.stop) == 0
        # Sooner than one that died would be missed.
        await until(lambda: "driving a batch" in batch.second.log, STALE_S)
        await batch.ends_at_the_second()
        assert "rror" not in batch.first.log


async def test_driver_that_stood_still_finds_that_its_batch_is_anothers(own: tuple[Place, EchoWorker]) -> None:
    async with begun(own) as batch:
        batch.first.process.send_signal(signal.SIGSTOP)
        try:
            await batch.is_taken_over()
        finally:
            batch.first.process.send_signal(signal.SIGCONT)
        await batch.ends_at_the_second()
        await until(lambda: "left to another gateway" in batch.first.log)


async def test_jobs_whose_results_are_gone_before_they_were_read_run_again(own: tuple[Place, EchoWorker]) -> None:
    place, worker = own
    worker.answer = lambda request: None
    with place.gateway("first") as first:
        async with place.client(first) as client:
            # A byte order mark is no part of the first line, when that is read again either.
            batch = await submitted(client, b"\xef\xbb\xbf" + jsonl([line(number, "m") for number in range(8)]))
            streams = worker.nats.jetstream()
            while (await streams.stream_info(batch_stream("default"))).state.messages < 8:  # noqa: ASYNC110 - none tells
                await asyncio.sleep(0.05)
        killed(first)
    quick(worker)
    await until(lambda: len(worker.computed) == 8)
    await worker.nats.jetstream().purge_stream(RESULTS_STREAM)
    with place.gateway("second") as second:
        async with place.client(second) as client:
            await assert_each_line_once(client, batch.id, 8, 30)
    assert {each.rpartition("-")[0][-2:] for each in worker.computed[8:]} == {"r1"}


async def test_batch_waits_for_a_store_that_is_away(own: tuple[Place, EchoWorker]) -> None:
    place, worker = own
    slow_and_dying(worker, 1 / 20)
    files, away = place.directory / "files", place.directory / "away"
    with place.gateway("first") as first:
        async with place.client(first) as client:
            batch = await submitted(client, jsonl([line(number, "m") for number in range(64)]))
            await until(lambda: len(worker.computed) > 10)
            # A network's directory that is not mounted any more: an empty one stands in its place.
            files.rename(away)
            files.mkdir()
            await until(lambda: len(worker.computed) > 30)
            with pytest.raises(openai.InternalServerError, match="cannot be used"):
                await client.files.retrieve(batch.input_file_id)
            shutil.rmtree(files)
            away.rename(files)
            quick(worker)
            await assert_each_line_once(client, batch.id, 64, 40)


async def test_record_that_nats_has_back_after_its_batch_has_ended_changes_nothing(
    own: tuple[Place, EchoWorker],
) -> None:
    """A NATS server that was killed may have messages again that newer ones had replaced."""
    place, _ = own
    with place.gateway("first") as first:
        async with place.client(first) as client:
            batch = await ended(client, await submitted(client, jsonl([line(0, "m")])))
            client_of_nats = DirectClient()
            await client_of_nats.connect(place.nats_url)
            log = BatchLog(client_of_nats)
            stored = await log.ended("default", batch.id)
            assert stored is not None
            again = msgspec.structs.replace(stored.record, status="finalizing", owner="dead")
            await log.put(again, 0)
            assert (await client.batches.retrieve(batch.id)).status == "completed"
            async with asyncio.timeout(15):
                while await log.list_active():  # noqa: ASYNC110 - no event announces it
                    await asyncio.sleep(0.1)
            assert (await client.batches.retrieve(batch.id)).status == "completed"
            assert len(await lines_of(client, batch.output_file_id)) == 1
            await client_of_nats.close()
        assert "could not be driven" not in first.log


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_each_line_is_answered_once_while_everything_is_killed_at_random_steps(
    start_nats: Callable[..., NatsServer], tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    num_lines, seed = int(os.environ.get("BATCH_LINES", "2000")), random.randrange(10**6)
    record_property("seed", seed)
    chance = random.Random(seed)
    nats = start_nats()
    place = Place(nats.url, tmp_path, {})
    async with echo_worker(place.nats_url) as worker:
        slow_and_dying(worker, 1 / 60)
        with contextlib.ExitStack() as stack:
            gateways = [stack.enter_context(place.gateway(f"gateway-{number}")) for number in range(2)]
            async with place.client(gateways[0]) as client:
                batch = await submitted(client, jsonl([line(number, "m") for number in range(num_lines)]))
            for round_number in range(8):
                await asyncio.sleep(chance.uniform(0.1, 6.0))
                victim = chance.randrange(3)
                if victim == 2:
                    nats.kill()
                    await asyncio.sleep(chance.uniform(0, 2.0))
                    nats.start()
                else:
                    killed(gateways[victim])
                    gateways[victim] = stack.enter_context(place.gateway(f"gateway-{victim}-{round_number}"))
            quick(worker)
            async with place.client(gateways[0]) as client:
                # NATS may have been killed a moment ago: a gateway says so by a 503, after which a client tries again.
                patient = client.with_options(max_retries=8)
                await assert_each_line_once(patient, batch.id, num_lines, 120 + num_lines / 100)
