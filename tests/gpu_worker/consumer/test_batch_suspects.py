"""Batch requests that are delivered again: what is known of them, when that is recorded, and for whom they make way."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest

from gpu_worker.consumer import batch_progress, batch_trials
from gpu_worker.consumer.batch_lane import BatchLane
from gpu_worker.consumer.batch_progress import NO_PROGRESS, ProgressRecords
from gpu_worker.consumer.batch_trials import HARMLESS_TOKENS
from gpu_worker.consumer.held_request import HeldRequest, HeldRequests
from gpu_worker.consumer.queued_message import ACK, REDELIVER, QueuedMessage
from gpu_worker.text.prompt_encoder import PromptEncoder
from shared.batch_progress import BatchProgress
from shared.messages import BatchResult, Cancel, Delta, Request, encode
from shared.sampling import Sampling
from shared.streams import StreamLimits
from shared.subjects import request_subject
from tests.gpu_worker.consumer.harness import MakeWorker, TestGateway, wait_until


class Records:
    """What is recorded of requests, as far as it may be read and written."""

    def __init__(self) -> None:
        self.record = NO_PROGRESS
        self.may_be_read = asyncio.Event()
        self.may_be_read.set()
        self.may_be_written = True
        self.saved: list[tuple[tuple[int, ...], int]] = []

    def has_room(self, tenant: str) -> bool:
        return True

    async def find(self, held: HeldRequest, is_wanted: Callable[[], bool]) -> BatchProgress:
        await self.may_be_read.wait()
        return self.record

    async def save(self, held: HeldRequest) -> bool:
        if self.may_be_written:
            num_good = held.message.num_delivered - held.num_failed - held.is_charged
            self.saved.append((held.request.emitted, num_good))
        return self.may_be_written


async def _no_end(tenant: str, request_id: str) -> None:
    return None


class Bench:
    """A batch lane whose requests begin nowhere."""

    def __init__(self) -> None:
        self.held, self.records = HeldRequests(), Records()
        self.begun: list[str] = []
        self.sent: list[bytes] = []
        self.results: list[BatchResult] = []
        nothing: Any = None
        intake: Any = SimpleNamespace(begin=lambda held, lane: self.begun.append(held.request.id))
        results: Any = SimpleNamespace(
            has=lambda key, message: False,
            put=lambda key, job, message, result, letter: self.results.append(result),
            kept=SimpleNamespace(end_of=_no_end),
            usage=Mock(),
        )
        nats: Any = SimpleNamespace(send=lambda subject, data: self.sent.append(data))
        records: Any = self.records
        self.lane = BatchLane("w", 5, intake, nothing, self.held, results, records, nats)

    def take(self, name: str, num_delivered: int) -> HeldRequest:
        job = Request(id=name, model="m", tenant="acme", text="x")
        subject = request_subject("m", "batch", "acme")
        self.lane.take(QueuedMessage(subject, encode(job), "ack", len(name), num_delivered, 0))
        held = self.held.get(f"acme/{name}")
        assert held is not None
        return held

    def write(self, held: HeldRequest, num_tokens: int) -> None:
        """Let the engine produce tokens of a request."""
        seq = held.num_output_tokens
        self.lane.advance(held, Delta(held.request.id, 0, seq, tuple(range(num_tokens)), "x" * num_tokens))

    async def settle(self) -> None:
        await self.lane._tasks.wait()


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setattr(batch_trials, "SETTLE_S", 0.0)
    return Bench()


async def test_new_job_that_is_looked_up_is_no_suspect(bench: Bench) -> None:
    """While one may come, no batch job is pulled: only what was delivered before may be one."""
    known = asyncio.Event()

    async def end_of(tenant: str, request_id: str) -> None:
        await known.wait()

    bench.lane.results.kept.end_of = end_of  # type: ignore[method-assign]
    bench.take("new", 1)
    await asyncio.sleep(0)
    assert not bench.lane.trials.is_active
    bench.take("again", 2)
    await asyncio.sleep(0)
    assert bench.lane.trials.is_active
    known.set()
    await bench.settle()


async def test_trial_that_cannot_be_recorded_does_not_begin(bench: Bench) -> None:
    held = bench.take("suspect", 2)
    await bench.settle()
    bench.lane.trials.review()
    assert (held.is_parked, held.is_charged) == (False, True)
    bench.records.may_be_written = False
    assert not await bench.lane.announce(held)
    assert (held.is_parked, held.is_charged) == (True, False)
    bench.records.may_be_written = True
    bench.lane.trials.review()
    assert await bench.lane.announce(held)
    # It waited, which is not a failure; now it begins.
    assert bench.records.saved == [((), 1), ((), 0)]
    assert bench.begun == ["suspect"] * 2


async def test_suspect_that_ended_before_its_trial_was_recorded_is_not_put_off(bench: Bench) -> None:
    held = bench.take("suspect", 2)
    await bench.settle()
    bench.lane.trials.review()
    bench.lane.cancel(Cancel(("suspect",), tenant="acme"))
    bench.records.may_be_written = False
    assert not await bench.lane.announce(held)
    assert (held.is_parked, bench.lane.trials.is_active) == (False, False)


async def test_suspect_cancelled_while_it_is_recorded_waits_for_no_trial(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def save(held: HeldRequest) -> bool:
        bench.lane.cancel(Cancel((held.request.id,), tenant="acme"))
        return True

    monkeypatch.setattr(bench.records, "save", save)
    bench.take("suspect", 2)
    await bench.settle()
    assert [result.finish for result in bench.results] == ["cancelled"]
    assert not bench.lane.trials.is_active


async def test_suspect_given_back_in_its_trial_is_not_charged_for_it(bench: Bench) -> None:
    held = bench.take("suspect", 4)
    await bench.settle()
    bench.lane.trials.review()
    assert (held.num_failed, held.is_charged) == (3, True)
    bench.lane.give_back(held)
    await bench.settle()
    assert (bench.records.saved[-1], bench.sent) == (((), 1), [REDELIVER])


async def test_second_suspect_waits_until_the_first_is_harmless_and_not_for_a_token(bench: Bench) -> None:
    first, _ = bench.take("first", 3), bench.take("later", 3)
    await bench.settle()
    bench.lane.trials.review()
    bench.write(first, HARMLESS_TOKENS - 1)
    bench.lane.trials.review()
    assert bench.begun == ["first"]
    bench.write(first, 1)
    assert bench.begun == ["first", "later"]
    await bench.settle()
    # All its deliveries are no failures any more.
    assert (first.num_failed, first.is_charged, bench.records.saved[-1]) == (0, False, ((), 3))


async def test_request_that_goes_on_from_far_is_harmless_only_by_what_it_produces_here(bench: Bench) -> None:
    bench.records.record = BatchProgress(b"", 0, "", 0, tuple(range(100)), "x" * 100)
    held = bench.take("suspect", 2)
    await bench.settle()
    bench.lane.trials.review()
    bench.write(held, HARMLESS_TOKENS - 1)
    assert (held.num_failed, held.is_charged) == (1, True)
    bench.write(held, 1)
    assert (held.num_failed, held.is_charged) == (0, False)


async def test_request_that_lost_a_worker_is_recorded_each_few_tokens_also_when_it_is_harmless(bench: Bench) -> None:
    held = bench.take("lost", 2)
    await bench.settle()
    bench.lane.trials.review()
    num_saved = len(bench.records.saved)
    for _ in range(3):
        bench.write(held, 32)
        await bench.settle()
        await asyncio.sleep(0.02)
    assert len(bench.records.saved) == num_saved + 3


async def test_delivery_that_comes_while_the_record_is_read_is_no_failure(bench: Bench) -> None:
    bench.records.may_be_read.clear()
    held = bench.take("slow", 2)
    await asyncio.sleep(0)
    assert bench.take("slow", 3) is held
    bench.records.may_be_read.set()
    await bench.settle()
    assert (held.num_failed, held.message.num_delivered) == (1, 3)


async def test_nothing_is_recorded_of_a_request_that_has_ended_meanwhile(bench: Bench) -> None:
    bench.take("slow", 1)
    bench.take("slow", 2)
    bench.lane.cancel(Cancel(("slow",), tenant="acme"))
    await bench.settle()
    assert (bench.records.saved, len(bench.results)) == ([], 1)


async def test_request_that_was_published_twice_is_answered_by_the_first_and_the_second_leaves_the_queue(
    bench: Bench,
) -> None:
    first = bench.take("twin", 1)
    bench.lane.take(QueuedMessage(first.message.subject, first.message.data, "ack", 99, 1, 0))
    await bench.settle()
    assert (bench.sent, bench.begun, first.message.stream_seq) == ([ACK], ["twin"], 4)


async def test_requests_of_people_do_not_make_way(bench: Bench) -> None:
    people = HeldRequest("r", Request(id="r", model="m"), QueuedMessage("s", b"", "ack", 1, 1, 0))
    bench.held.add(people)
    bench.lane.make_way()
    await bench.settle()
    assert (bench.held.is_current(people), bench.sent) == (True, [])


async def test_request_given_back_while_its_record_is_read_keeps_what_is_recorded(bench: Bench) -> None:
    bench.records.may_be_read.clear()
    held = bench.take("moved", 4)
    await asyncio.sleep(0)
    bench.lane.give_back(held)
    bench.records.record = BatchProgress(b"", 0, "", 2, (5, 6), "ab")
    bench.records.may_be_read.set()
    await bench.settle()
    # One of its deliveries has failed, and still counts.
    assert bench.records.saved == [((5, 6), 3)]
    assert (bench.sent, bench.begun) == ([REDELIVER], [])


async def test_request_cancelled_while_its_record_is_read_ends_with_what_is_recorded(bench: Bench) -> None:
    bench.records.may_be_read.clear()
    held = bench.take("cancelled", 2)
    await asyncio.sleep(0)
    bench.lane.cancel(Cancel(("cancelled",), tenant="acme"))
    bench.records.record = BatchProgress(b"", 0, "", 1, (5, 6), "ab", in_reasoning=True)
    bench.records.may_be_read.set()
    await bench.settle()
    (result,) = bench.results
    assert (result.finish, result.text, result.token_ids) == ("cancelled", "ab", (5, 6))
    assert (result.completion_tokens, result.in_reasoning) == (2, True)
    assert not bench.held.is_current(held)


async def test_cancelled_suspect_ends_with_what_is_recorded(bench: Bench) -> None:
    bench.records.record = BatchProgress(b"", 0, "", 1, (5, 6), "ab")
    held = bench.take("cancelled", 3)
    await bench.settle()
    assert held.is_parked
    bench.lane.cancel(Cancel(("cancelled",), tenant="acme"))
    (result,) = bench.results
    assert (result.finish, result.text, result.token_ids, result.completion_tokens) == ("cancelled", "ab", (5, 6), 2)
    assert not bench.lane.trials.is_active


async def test_delivery_to_the_worker_that_holds_it_is_no_failure(bench: Bench) -> None:
    held = bench.take("slow", 2)
    await bench.settle()
    for num_delivered in (3, 4, 5, 6):
        bench.take("slow", num_delivered)
        await bench.settle()
    assert (held.is_parked, held.num_failed) == (True, 1)
    # Whoever gets it next finds that of six deliveries five are no failures.
    assert bench.records.saved[-1] == ((), 5)


async def test_what_has_produced_nothing_makes_way_for_a_suspect_of_people(bench: Bench) -> None:
    parked, new, writing = bench.take("parked", 2), bench.take("new", 1), bench.take("writing", 1)
    await bench.settle()
    writing.num_output_tokens = 1
    bench.lane.make_way()
    await bench.settle()
    assert {held.request.id for held in bench.held} == {"parked", "writing"}
    assert parked.is_parked
    assert bench.sent == [REDELIVER]
    bench.held.reserved_until = math.inf
    late = QueuedMessage(new.message.subject, new.message.data, "ack", 9, 1, 0)
    bench.lane.take(late)
    await bench.settle()
    assert bench.sent == [REDELIVER] * 2
    # Neither is a failure.
    assert bench.records.saved[-2:] == [((), 1)] * 2
    assert bench.begun == ["new", "writing"]


async def test_worker_that_drains_gives_back_what_waits_for_its_trial(bench: Bench) -> None:
    bench.take("parked", 2)
    bench.take("new", 1)
    await bench.settle()
    bench.lane.give_back_suspects()
    await bench.settle()
    assert ([held.request.id for held in bench.held], bench.sent) == (["new"], [REDELIVER])
    assert not bench.lane.trials.is_active


@pytest.mark.parametrize(("num_unread", "num_failed"), [(0, 3), (3, 3), (9, 1)])
async def test_record_that_nats_does_not_tell_is_asked_for_again_and_nobody_given_up_for_it(
    monkeypatch: pytest.MonkeyPatch, num_unread: int, num_failed: int
) -> None:
    monkeypatch.setattr(batch_progress, "_READ_INTERVAL_S", 0.0)
    nats: Any = SimpleNamespace(jetstream=lambda timeout: None)
    records = ProgressRecords(nats, "revision")
    answers: list[BatchProgress | None] = [*([None] * num_unread), BatchProgress(b"", 0, "", 6)]

    async def load(tenant: str, request_id: str, message: QueuedMessage) -> BatchProgress | None:
        return answers.pop(0)

    monkeypatch.setattr(records, "load", load)
    message = QueuedMessage("s", b"", "r", stream_seq=1, num_delivered=10, num_pending=0)
    record = await records.find(HeldRequest("k", Request(id="r", model="m"), message), lambda: True)
    assert message.num_delivered - 1 - record.num_delivered == num_failed


async def test_record_of_a_request_that_has_ended_is_asked_for_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_progress, "_READ_INTERVAL_S", 0.0)
    nothing: Any = SimpleNamespace(jetstream=lambda timeout: None)
    records = ProgressRecords(nothing, "revision")
    num_asked = 0

    async def load(tenant: str, request_id: str, message: QueuedMessage) -> BatchProgress | None:
        nonlocal num_asked
        num_asked += 1
        return None

    monkeypatch.setattr(records, "load", load)
    message = QueuedMessage("s", b"", "r", stream_seq=1, num_delivered=2, num_pending=0)
    await records.find(HeldRequest("k", Request(id="r", model="m"), message), lambda: False)
    assert num_asked == 1


async def test_record_counts_neither_failures_nor_a_trial_among_the_good_deliveries() -> None:
    published: list[bytes] = []
    failure: Exception | None = None

    async def publish(subject: str, payload: bytes) -> None:
        if failure is not None:
            raise failure
        published.append(payload)

    nats: Any = SimpleNamespace(jetstream=lambda timeout: SimpleNamespace(publish=publish))
    records = ProgressRecords(nats, "revision")
    message = QueuedMessage("s", b"", "r", stream_seq=1, num_delivered=9, num_pending=0)
    held = HeldRequest("k", Request(id="r", model="m", tenant="t"), message)
    for num_failed, is_charged in ((0, False), (2, False), (2, True)):
        held.num_failed, held.is_charged = num_failed, is_charged
        assert await records.save(held)
    read = [msgspec.msgpack.decode(payload, type=BatchProgress) for payload in published]
    assert [each.num_delivered for each in read] == [9, 7, 6]
    failure = TimeoutError()
    assert not await records.save(held)


async def test_tenant_that_records_much_waits_and_others_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    async def publish(subject: str, payload: bytes) -> None:
        pass

    nats: Any = SimpleNamespace(jetstream=lambda timeout: SimpleNamespace(publish=publish))
    records = ProgressRecords(nats, "revision")
    now = 100.0
    monkeypatch.setattr(batch_progress.time, "monotonic", lambda: now)
    message = QueuedMessage("s", b"", "r", stream_seq=1, num_delivered=1, num_pending=0)
    long = HeldRequest("k", Request(id="r", model="m", tenant="loud"), message, parts=["x" * (1 << 20)])
    num_saved = 0
    while records.has_room("loud") and num_saved < 100:
        await records.save(long)
        num_saved += 1
    # Four seconds' worth at once, then 2 MB a second.
    assert num_saved == 8
    assert records.has_room("quiet")
    now += 0.6
    assert records.has_room("loud")


async def test_request_whose_record_had_to_make_room_is_not_given_up(gateway: TestGateway) -> None:
    message = QueuedMessage("s", b"job", "ack", stream_seq=7, num_delivered=9, num_pending=0)
    record = await ProgressRecords(gateway.nats, "own").load("acme", "nobody", message)
    assert record is not None
    assert (record.num_delivered, record.token_ids) == (7, ())


@pytest.mark.slow
async def test_batch_prompt_makes_way_for_a_suspect_of_people_and_is_computed_after_it(
    make_worker: MakeWorker, gateway: TestGateway
) -> None:
    worker = await make_worker(simulate=1500.0)
    table = worker.worker.consumer._held
    one_token = Sampling(max_tokens=1, ignore_eos=True)
    job = gateway.request(lane="batch", tenant="t", reply=None, sampling=one_token)
    await gateway.publish_job(job)
    await wait_until(lambda: any(held.sequence is not None and held.is_without_output for held in table))
    suspect = await gateway.publish(gateway.request(probation=1, sampling=one_token))
    await suspect.claimed.wait()
    assert table.count("batch") == 0
    await suspect.wait()
    result = await gateway.result(job.id, "t", timeout_s=30)
    assert (result.finish, result.completion_tokens) == ("length", 1)


@pytest.mark.slow
async def test_job_that_kills_workers_while_its_prompt_is_read_is_given_up(
    make_worker: MakeWorker, gateway: TestGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = 0

    async def never_end(*_: Any, **__: Any) -> None:
        nonlocal begun
        begun += 1
        await asyncio.Event().wait()

    monkeypatch.setattr(PromptEncoder, "is_short", lambda *_: False)
    monkeypatch.setattr(PromptEncoder, "encode", never_end)
    limits = StreamLimits(ack_wait_s=1.0, batch_max_deliver=2)
    job = gateway.request(lane="batch", tenant="t", reply=None)
    await gateway.publish_job(job)
    for num_begun in (1, 2):
        worker = await make_worker(limits=limits)
        await wait_until(lambda: begun == num_begun, 20)  # noqa: B023
        await worker.nats.close()
    await make_worker(limits=limits)
    result = await gateway.result(job.id, "t", timeout_s=20)
    assert (result.finish, result.error) == ("failed", "given up after 2 attempts: each lost its worker")
