"""Requests that are suspected of killing workers: one at a time, announced before they begin.

When batch requests that may kill workers begin.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math

import pytest
from nats.errors import FlushTimeoutError

from gpu_worker.consumer import batch_trials
from gpu_worker.consumer.batch_progress import NO_PROGRESS, ProgressRecords
from gpu_worker.consumer.batch_trials import HARMLESS_TOKENS, BatchTrials
from gpu_worker.consumer.held_request import HeldRequest, HeldRequests
from gpu_worker.consumer.queued_message import QueuedMessage
from shared.batch_streams import batch_stream
from shared.messages import Request
from shared.sampling import Sampling
from shared.subjects import probe_subject
from tests.gpu_worker.consumer.harness import MakeWorker, RunningWorker, TestGateway, wait_until
from tests.gpu_worker.core.sequences import make_sequence

ENDLESS = Sampling(max_tokens=1500, ignore_eos=True)
LONG = Sampling(max_tokens=60, ignore_eos=True)


@pytest.mark.parametrize("ending", ["cancelled", "finished", "replaced"])
async def test_suspect_that_is_gone_makes_way_for_the_next(
    make_worker: MakeWorker, gateway: TestGateway, ending: str
) -> None:
    await make_worker(simulate=5.0)
    max_tokens = 10 if ending == "finished" else 1500
    request = gateway.request(probation=1400, sampling=Sampling(max_tokens=max_tokens, ignore_eos=True))
    first = await gateway.publish(request)
    await first.wait_for_tokens(1)
    if ending == "cancelled":
        await gateway.cancel(request.id)
    if ending == "replaced":
        replaced = gateway.request(id=request.id, epoch=1, probation=3, sampling=LONG)
        await (await gateway.publish(replaced)).claimed.wait()
    second = await gateway.publish(gateway.request(probation=1))
    assert (await second.wait()).finish.reason == "length"


async def test_suspect_is_claimed_before_the_engine_has_it(
    worker: RunningWorker, gateway: TestGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    outbox, engine = worker.worker.consumer._outbox, worker.worker._engine
    deliver, add = outbox.deliver, engine.add

    async def watched_deliver(reply: str) -> None:
        await deliver(reply)
        events.append("delivered")

    monkeypatch.setattr(outbox, "deliver", watched_deliver)
    monkeypatch.setattr(engine, "add", lambda sequence: (events.append("added"), add(sequence)))
    answer = await gateway.ask(probation=1)
    assert events == ["delivered", "added"]
    # Nothing is known of its prompt when it is announced.
    assert [delta.prompt_tokens is not None for delta in answer.deltas] == [False, True] + [False] * 8


async def test_suspect_that_cannot_be_announced_is_left_to_the_queue(
    worker: RunningWorker, gateway: TestGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_failed = asyncio.Event()

    async def fail(reply: str) -> None:
        has_failed.set()
        raise OSError

    monkeypatch.setattr(worker.worker.consumer._outbox, "deliver", fail)
    await gateway.publish(gateway.request(probation=1))
    await has_failed.wait()
    await wait_until(lambda: len(worker.worker.consumer._held) == 0)
    assert worker.worker._engine.stats.running == 0
    assert await gateway.num_queued() == 1


async def test_suspect_whose_claim_may_still_arrive_is_given_back_behind_it(
    worker: RunningWorker, gateway: TestGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    outbox = worker.worker.consumer._outbox

    async def lose_sight(reply: str) -> None:
        outbox.flush()
        raise FlushTimeoutError

    monkeypatch.setattr(outbox, "deliver", lose_sight)
    answer = await gateway.ask(probation=1)
    assert answer.claimed.is_set()
    assert answer.finish.reason == "handoff"
    assert worker.worker._engine.stats.running == 0
    await gateway.wait_until_acknowledged()


async def test_claim_of_a_suspect_that_was_left_to_the_queue_does_not_go_out_later(
    worker: RunningWorker, gateway: TestGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    outbox, held = worker.worker.consumer._outbox, worker.worker.consumer._held
    kept: list[str] = []
    monkeypatch.setattr(outbox._subscribers, "has", lambda reply: kept.append(reply) is not None)
    suspect = await gateway.publish(gateway.request(probation=1))
    await wait_until(lambda: bool(kept) and len(held) == 0)
    monkeypatch.undo()
    outbox.send_kept()
    await gateway.ask()
    assert not suspect.claimed.is_set()


async def test_batch_request_does_not_begin_beside_a_suspect(make_worker: MakeWorker, gateway: TestGateway) -> None:
    worker = await make_worker(simulate=5.0)
    queue = worker.worker.consumer._batch_queue
    suspect = await gateway.publish(gateway.request(probation=1400, sampling=ENDLESS))
    await suspect.wait_for_tokens(1)
    await wait_until(lambda: queue.outstanding == 0)  # pulls made before have ended
    batch = gateway.request(lane="batch", tenant="t", reply=None)
    await gateway.publish_job(batch)
    await asyncio.sleep(0.3)
    assert worker.worker.consumer._held.count("batch") == 0
    await gateway.cancel(*(request_id for request_id, _ in gateway.answers))
    await gateway.wait_until_acknowledged(batch_stream("t"))


async def test_worker_answers_a_gateways_probe_and_nobody_elses(worker: RunningWorker, gateway: TestGateway) -> None:
    reply = await gateway.nats.request(probe_subject(worker.name), b"", timeout=10)
    assert reply.data == b""
    assert not reply.headers
    forged = await gateway.nats.subscribe("hr.cancel.forged")
    await gateway.nats.publish(probe_subject(worker.name), b"", reply="hr.cancel.forged")
    await gateway.nats.request(probe_subject(worker.name), b"", timeout=10)
    assert forged.pending_msgs == 0


class Lane:
    """Requests of a batch lane, those that have begun, and the trials of those that have lost workers."""

    def __init__(self) -> None:
        self.held = HeldRequests()
        self.begun: list[str] = []
        self.trials = BatchTrials(self.held, lambda suspect: self.begun.append(suspect.key), self.make_way)

    def make_way(self) -> None:
        for held in self.held:
            if not held.is_parked and held.is_without_output:
                self.end(held)

    def hold(self, name: str, num_failed: int = 0) -> HeldRequest:
        message = QueuedMessage("s", b"", "r", stream_seq=1, num_delivered=1 + num_failed, num_pending=0)
        held = HeldRequest(name, Request(id=name, model="m", lane="batch", text="x"), message, num_failed=num_failed)
        self.held.add(held)
        if num_failed:
            self.trials.add(held)
        return held

    def write(self, held: HeldRequest, num_tokens: int) -> bool:
        held.num_output_tokens += num_tokens
        return bool(held.num_failed) and self.trials.note_output(held, num_tokens)

    def end(self, held: HeldRequest) -> None:
        self.held.remove(held)
        self.trials.forget(held)


@pytest.fixture
def lane(monkeypatch: pytest.MonkeyPatch) -> Lane:
    monkeypatch.setattr(batch_trials, "SETTLE_S", 0.0)
    return Lane()


def test_suspects_begin_one_after_the_other_those_with_fewest_losses_first(lane: Lane) -> None:
    worst, first, second = lane.hold("worst", 3), lane.hold("first", 1), lane.hold("second", 1)
    lane.trials.review()
    lane.trials.review()
    assert lane.begun == ["first"]
    assert (first.is_untried, worst.is_untried) == (True, False)
    assert not lane.write(first, 1)
    assert lane.begun == ["first", "second"]
    lane.write(second, 1)
    assert lane.begun == ["first", "second", "worst"]
    assert lane.trials.is_active
    # Who has lost several workers is tried for longer.
    lane.write(worst, HARMLESS_TOKENS - 1)
    assert lane.trials.is_active
    assert lane.write(worst, 1)
    assert (worst.num_failed, lane.trials.is_active) == (0, False)


def test_suspect_waits_for_what_has_begun_beside_it_and_for_the_other_lane(lane: Lane) -> None:
    new = lane.hold("new")
    lane.hold("suspect", 1)
    lane.trials.review()
    assert lane.begun == []
    lane.write(new, 1)
    lane.held.reserved_until = math.inf
    lane.trials.review()
    assert lane.begun == []
    lane.held.reserved_until = 0.0
    lane.trials.num_coming = 1
    lane.trials.review()
    assert lane.begun == []
    lane.trials.num_coming = 0
    lane.trials.review()
    assert lane.begun == ["suspect"]


def test_suspect_waits_no_longer_than_the_longest_wait_for_what_has_begun_beside_it(
    lane: Lane, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = lane.hold("new")
    lane.hold("suspect", 1)
    lane.trials.review()
    assert lane.held.get("new") is new
    monkeypatch.setattr(batch_trials, "MAX_WAIT_S", 0.0)
    lane.trials.review()
    lane.trials.review()
    assert lane.begun == ["suspect"]


def test_suspect_waits_until_what_was_lost_with_it_has_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_trials, "SETTLE_S", 60.0)
    lane = Lane()
    lane.hold("suspect", 1)
    lane.trials.review()
    assert lane.begun == []


async def test_end_of_a_trial_and_of_one_that_waits_lets_the_next_begin(lane: Lane) -> None:
    tried, cancelled, _ = lane.hold("tried", 1), lane.hold("cancelled", 2), lane.hold("next", 3)
    lane.trials.review()
    lane.end(cancelled)
    lane.end(tried)
    await asyncio.sleep(0)
    assert lane.begun == ["tried", "next"]


async def test_tokens_of_another_revision_or_message_are_not_continued(gateway: TestGateway) -> None:
    message = QueuedMessage("s", b"job", "ack", stream_seq=7, num_delivered=3, num_pending=0)
    held = HeldRequest("k", gateway.request(lane="batch", tenant="acme", reply=None), message)
    held.sequence, held.num_output_tokens, held.parts = make_sequence([1, 2], emitted=[5, 6]), 2, ["a", "b"]
    own, other = (ProgressRecords(gateway.nats, revision) for revision in ("own", "other"))
    assert await own.save(held)
    found = [await records.load("acme", held.request.id, message) for records in (own, other)]
    # The number of deliveries counts, whatever weights the job ran on.
    assert [(each.token_ids, each.text, each.num_delivered) for each in found] == [((5, 6), "ab", 3), ((), "", 3)]
    for changes in ({"data": b"another job"}, {"stream_seq": 8}):
        changed = dataclasses.replace(message, **changes)  # type: ignore[arg-type]
        assert await own.load("acme", held.request.id, changed) == NO_PROGRESS
