"""Requests that are suspected of killing workers: one at a time, announced before they begin."""

from __future__ import annotations

import asyncio

import pytest
from nats.errors import FlushTimeoutError

from shared.batch_streams import batch_stream
from shared.sampling import Sampling
from shared.subjects import probe_subject
from tests.gpu_worker.consumer.harness import MakeWorker, RunningWorker, TestGateway, wait_until

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
