"""Results that NATS does not take: they wait, and the lane with them, and nothing is computed twice."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from nats.aio.msg import Msg
from nats.js.api import DiscardPolicy, StreamConfig

from gpu_worker.consumer.queued_message import QueuedMessage
from gpu_worker.consumer.result_store import ResultStore
from shared.batch_streams import batch_stream
from shared.kept_results import JOB_ENDED
from shared.messages import BatchResult, FinishReason, Request
from shared.nats_connection import connect
from shared.sampling import Sampling
from shared.server_clock import ServerClock
from shared.streams import RESULTS_STREAM, USAGE_STREAM, StreamLimits, ensure_streams, stream_configs
from shared.usage_ledger import read_usage
from tests.gpu_worker.consumer.harness import RunningWorker, TestGateway, fresh_name, start_worker, wait_until
from tests.servers import NatsServer

MakeWorker = Callable[[], Awaitable[RunningWorker]]
NUM_JOBS = 40
LIMITS = StreamLimits(ack_wait_s=2.0, batch_max_deliver=1, results_max_bytes=2000)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NatsServer]:
    """A server of its own, whose stream of results is soon full and then takes no more, like a disk."""
    with NatsServer(tmp_path).running() as server:
        yield server


def _results_config() -> StreamConfig:
    (config,) = (config for config in stream_configs(LIMITS) if config.name == RESULTS_STREAM)
    return config.evolve(discard=DiscardPolicy.NEW)


@pytest.fixture
async def gateway(server: NatsServer) -> AsyncIterator[TestGateway]:
    nats = await connect(server.url, role="gateway", name="test")
    gateway = TestGateway(nats, fresh_name("m"))
    await gateway.js.add_stream(_results_config())
    await gateway.start(LIMITS)
    yield gateway
    await nats.close()


@pytest.fixture
async def make_worker(
    server: NatsServer, gateway: TestGateway
) -> AsyncIterator[Callable[[], Awaitable[RunningWorker]]]:
    workers: list[RunningWorker] = []

    async def make() -> RunningWorker:
        workers.append(await start_worker(server.url, gateway.model, LIMITS, max_num_seqs=4))
        return workers[-1]

    yield make
    for worker in workers:
        await worker.close()


async def _publish_jobs(gateway: TestGateway) -> list[Request]:
    sampling = Sampling(max_tokens=16, ignore_eos=True)
    jobs = [gateway.request(lane="batch", tenant="acme", reply=None, sampling=sampling) for _ in range(NUM_JOBS)]
    for job in jobs:
        await gateway.publish_job(job)
    return jobs


async def _num_stored(gateway: TestGateway) -> int:
    info = await gateway.js.stream_info(RESULTS_STREAM)
    return int(info.state.messages)


async def test_full_disk_holds_the_batch_lane_up_and_nothing_is_lost_or_done_again(
    gateway: TestGateway, make_worker: MakeWorker
) -> None:
    replies: list[bytes] = []

    async def hear(message: object) -> None:
        replies.append(message.data)  # type: ignore[attr-defined]

    await gateway.nats.subscribe("hr.stored.acme.*", cb=hear)
    worker = await make_worker()
    lane = worker.worker.consumer._batch
    jobs = await _publish_jobs(gateway)
    await wait_until(lambda: lane.results.is_blocked)
    stored = await _num_stored(gateway)
    # Longer than the queue waits for an acknowledgement: nothing is delivered again, and nothing new is begun.
    idle = await worker.wait_for_heartbeat(lambda heartbeat: heartbeat.running == heartbeat.waiting == 0)
    await asyncio.sleep(2 * LIMITS.ack_wait_s)
    later = await worker.wait_for_heartbeat(lambda heartbeat: True)
    assert later.step - idle.step <= 2 * 16
    assert await _num_stored(gateway) == stored < NUM_JOBS
    await gateway.js.update_stream(_results_config().evolve(max_bytes=1 << 20))

    async def are_all_stored() -> bool:
        return await _num_stored(gateway) == NUM_JOBS

    await wait_until(are_all_stored, 15)
    await wait_until(lambda: len(replies) == NUM_JOBS)
    results = [msgspec.json.decode(reply, type=BatchResult) for reply in replies]
    assert {result.id for result in results} == {job.id for job in jobs}
    assert {(result.finish, result.completion_tokens, result.attempt) for result in results} == {("length", 16, 1)}
    assert not lane.results.is_blocked

    async def is_empty() -> bool:
        return bool((await gateway.js.stream_info(batch_stream("acme"))).state.messages == 0)

    await wait_until(is_empty)


async def test_worker_that_stops_before_its_results_are_stored_leaves_them_to_the_queue(
    gateway: TestGateway, make_worker: MakeWorker
) -> None:
    worker = await make_worker()
    await _publish_jobs(gateway)
    await wait_until(lambda: worker.worker.consumer._batch.results.is_blocked)
    async with asyncio.timeout(10):
        await worker.drain(0.0)
        await worker.worker.consumer.close()
    # The sequence counts what was purged since, too: a stream that is nearly full drops the oldest.
    num_written = (await gateway.js.stream_info(RESULTS_STREAM)).state.last_seq
    assert (await gateway.js.stream_info(batch_stream("acme"))).state.messages == NUM_JOBS - num_written


async def test_results_of_a_job_that_was_published_twice_are_written_at_the_same_time(
    gateway: TestGateway, caplog: pytest.LogCaptureFixture
) -> None:
    store = ResultStore(gateway.nats, ServerClock())
    job = gateway.request(lane="batch", tenant="acme", reply=None)
    result = BatchResult(id=job.id, model=job.model, tenant="acme", text="", finish="failed")
    for number in (1, 2):
        store.put(f"acme/{job.id}", job, QueuedMessage("s", b"", f"ack.{number}", number, 1, 0), result)
    await wait_until(lambda: not store._tasks)
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []
    assert await _num_stored(gateway) == 1


async def test_result_on_its_way_answers_the_last_delivery_of_its_own_message_and_no_other(
    gateway: TestGateway,
) -> None:
    answered: list[str] = []

    async def hear(message: Msg) -> None:
        answered.append(message.subject)

    await gateway.nats.subscribe("ack.*", cb=hear)
    store = ResultStore(gateway.nats, ServerClock())
    job = gateway.request(lane="batch", tenant="acme", reply=None)
    result = BatchResult(id=job.id, model=job.model, tenant="acme", text="", finish="failed")
    first, again, other = (
        QueuedMessage("s", b"", f"ack.{name}", number, num_delivered, 0)
        for name, number, num_delivered in (("first", 1, 1), ("again", 1, 2), ("other", 2, 1))
    )
    store.put("key", job, first, result)
    assert [store.has("key", message) for message in (again, other)] == [True, False]
    await wait_until(lambda: bool(answered))
    assert answered == ["ack.again"]


async def test_result_that_is_stored_first_leaves_that_of_a_later_message_on_its_way(
    gateway: TestGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, may_go_on, stored = ResultStore(gateway.nats, ServerClock()), asyncio.Event(), list[bytes]()

    async def hold_the_second(tenant: str, job_id: str, payload: bytes, finish: str) -> bool:
        stored.append(payload)
        if len(stored) == 2:
            await may_go_on.wait()
        return True

    monkeypatch.setattr(store.kept, "store", hold_the_second)
    job = gateway.request(lane="batch", tenant="acme", reply=None)
    result = BatchResult(id=job.id, model=job.model, tenant="acme", text="", finish="failed")
    messages = [QueuedMessage("s", b"", f"ack.{number}", number, 1, 0) for number in (1, 2)]
    for message in messages:
        store.put("key", job, message, result)
    await wait_until(lambda: len(store._tasks) == 1)
    assert store.has("key", messages[1])
    may_go_on.set()
    await store.close()


@pytest.mark.parametrize(("finish", "counted"), [("cancelled", {"requests": 1, "prompt_tokens": 5}), ("length", {})])
async def test_work_counts_once_although_who_cancelled_the_job_has_stored_a_result(
    gateway: TestGateway, monkeypatch: pytest.MonkeyPatch, finish: FinishReason, counted: dict[str, int]
) -> None:
    store = ResultStore(gateway.nats, ServerClock())

    async def is_there_already(*_: object) -> bool:
        return False

    monkeypatch.setattr(store.kept, "store", is_there_already)
    job = gateway.request(lane="batch", tenant="acme", reply=None)
    result = BatchResult(id=job.id, model=job.model, tenant="acme", text="", finish=finish, prompt_tokens=5)
    store.put("key", job, QueuedMessage("s", b"", "ack.1", 1, 1, 0), result)
    await store.close()
    assert {total.measure: total.total async for total in read_usage(gateway.js)} == counted


@pytest.mark.parametrize(("code", "num_told"), [(None, 1), (JOB_ENDED, 0)])
async def test_repeated_attempt_that_finds_a_result_tells_its_own_but_not_that_the_job_ended_before(
    gateway: TestGateway, monkeypatch: pytest.MonkeyPatch, code: str | None, num_told: int
) -> None:
    told: list[bytes] = []

    async def hear(message: Msg) -> None:
        told.append(message.data)

    await gateway.nats.subscribe("hr.reply.acme.>", cb=hear)
    store, attempts = ResultStore(gateway.nats, ServerClock()), 0

    async def answer_is_lost_once(*_: object) -> bool:
        nonlocal attempts
        attempts += 1
        if attempts == 1:
            raise TimeoutError
        return False

    monkeypatch.setattr(store.kept, "store", answer_is_lost_once)
    job = gateway.request(lane="batch", tenant="acme", reply="hr.reply.acme.x")
    result = BatchResult(id=job.id, model=job.model, tenant="acme", text="", finish="failed", error_code=code)
    store.put("key", job, QueuedMessage("s", b"", "ack.1", 1, 1, 0), result)
    await wait_until(lambda: attempts == 2 and not store._tasks)
    await gateway.nats.flush()
    assert len(told) == num_told


async def test_result_that_no_message_holds_is_told_as_failed(gateway: TestGateway) -> None:
    results: list[BatchResult] = []

    async def hear(message: Msg) -> None:
        results.append(msgspec.json.decode(message.data, type=BatchResult))

    await gateway.nats.subscribe("hr.stored.acme.*", cb=hear)
    store = ResultStore(gateway.nats, ServerClock())
    for number, size in enumerate((1, gateway.nats.max_payload)):
        job = gateway.request(lane="batch", tenant="acme", reply=None)
        result = BatchResult(
            id=job.id, model=job.model, tenant="acme", text="x" * size, token_ids=(1,), finish="length"
        )
        store.put(f"acme/{job.id}", job, QueuedMessage("s", b"", f"ack.{number}", number, 1, 0), result)
        await wait_until(lambda num_told=number + 1: len(results) == num_told)
    whole, too_large = results
    assert (whole.finish, whole.error, whole.text, whole.token_ids) == ("length", None, "x", (1,))
    assert (too_large.finish, too_large.text, too_large.token_ids) == ("failed", "", ())
    assert too_large.error == "the result is too large for one message"


async def test_usage_that_was_refused_is_sent_when_the_store_closes(gateway: TestGateway) -> None:
    await gateway.js.delete_stream(USAGE_STREAM)
    store = ResultStore(gateway.nats, ServerClock())
    store.usage.add("acme", "m", prompt_tokens=5, cached_tokens=0, completion_tokens=0)
    await store.flush_usage()
    await ensure_streams(gateway.js, LIMITS)
    await store.close()
    assert {total.measure: total.total async for total in read_usage(gateway.js)} == {"requests": 1, "prompt_tokens": 5}
