from __future__ import annotations

import asyncio
import time

import msgspec
import pytest

from shared.messages import encode
from shared.sampling import Sampling
from shared.streams import StreamLimits
from shared.subjects import worker_subject
from tests.gpu_worker.consumer.harness import MakeWorker, RunningWorker, TestGateway, wait_until

ENDLESS = Sampling(max_tokens=1500, ignore_eos=True)


async def test_draining_worker_finishes_running_requests_and_hands_over_waiting_ones(
    make_worker: MakeWorker, gateway: TestGateway
) -> None:
    sampling = Sampling(max_tokens=30, ignore_eos=True)
    answers = [await gateway.publish(gateway.request(sampling=sampling)) for _ in range(6)]
    worker = await make_worker(max_num_seqs=2, simulate=10.0)
    held = worker.worker.consumer._held
    await wait_until(lambda: len(held) == 3)
    await answers[1].wait_for_tokens(1)
    await worker.drain()
    ended = [await answer.wait() for answer in answers[:3]]
    assert [answer.finish.reason for answer in ended] == ["length", "length", "handoff"]
    assert ended[2].token_ids == []
    assert not any(answer.deltas for answer in answers[3:])
    assert (await worker.wait_for_heartbeat(lambda heartbeat: heartbeat.draining)).max_num_seqs == 2
    await make_worker(simulate=0.0)
    for answer in answers[3:]:
        assert (await answer.wait()).finish.reason == "length"


async def test_drain_timeout_hands_over_what_still_runs_for_another_worker_to_continue(
    make_worker: MakeWorker, gateway: TestGateway
) -> None:
    worker = await make_worker(simulate=2.0)
    sampling = Sampling(max_tokens=400, ignore_eos=True, seed=11)
    request = gateway.request(sampling=sampling)
    answer = await gateway.publish(request)
    await answer.wait_for_tokens(5)
    await worker.drain(0.02)
    await answer.wait()
    assert answer.finish.reason == "handoff"
    assert answer.deltas[-1].seq == len(answer.token_ids)
    second = await make_worker(simulate=0.0)
    rest = await gateway.ask(id=request.id, sampling=sampling, epoch=1, emitted=tuple(answer.token_ids))
    assert set(rest.workers) == {second.name}
    whole = await gateway.ask(sampling=sampling)
    assert answer.text + rest.text == whole.text


async def test_request_of_a_worker_that_vanished_is_delivered_to_another(
    make_worker: MakeWorker, gateway: TestGateway
) -> None:
    limits = StreamLimits(ack_wait_s=1.0)
    first = await make_worker(limits=limits)
    answer = await gateway.publish(gateway.request(sampling=Sampling(max_tokens=1500, ignore_eos=True)))
    await answer.wait_for_tokens(3)
    await first.close()
    second = await make_worker(limits=limits, simulate=0.0)
    await answer.wait()
    assert answer.workers[-1] == second.name
    assert answer.finish.usage.completion_tokens == 1500


async def test_held_request_is_not_delivered_again_while_it_runs(make_worker: MakeWorker, gateway: TestGateway) -> None:
    limits = StreamLimits(ack_wait_s=0.3)
    await make_worker(limits=limits, simulate=2.0)
    await make_worker(limits=limits, simulate=2.0)
    answer = await gateway.ask(sampling=Sampling(max_tokens=400, ignore_eos=True))
    assert len(set(answer.workers)) == 1
    assert [delta.seq for delta in answer.deltas] == [0, *range(400)]


async def test_full_worker_leaves_requests_for_others(make_worker: MakeWorker, gateway: TestGateway) -> None:
    first = await make_worker(max_num_seqs=1)
    blocking = await gateway.publish(gateway.request(sampling=ENDLESS))
    await blocking.wait_for_tokens(1)
    second = await make_worker(max_num_seqs=8)
    answers = [await gateway.ask() for _ in range(5)]
    assert {answer.workers[-1] for answer in answers} <= {first.name, second.name}
    assert sum(answer.workers[-1] == second.name for answer in answers) >= 4


async def test_worker_that_stands_still_swallows_no_request_that_comes_later(
    make_worker: MakeWorker, gateway: TestGateway
) -> None:
    frozen = await make_worker()
    queues = frozen.worker.consumer._interactive_queues
    for queue in (queues.resumed, queues.new):
        assert queue._task is not None
        queue._task.cancel()  # what it has pulled for, it is still sent
    await wait_until(lambda: queues.resumed.outstanding == queues.new.outstanding == 0)  # the pulls have expired
    second = await make_worker()
    answers = await asyncio.gather(*(gateway.ask() for _ in range(8)))
    assert {worker for answer in answers for worker in answer.workers} == {second.name}


async def test_heartbeat_tells_how_far_the_queue_was_pulled(make_worker: MakeWorker, gateway: TestGateway) -> None:
    worker = await make_worker()
    sequences = [await gateway.publish_raw(encode(gateway.request())) for _ in range(3)]
    await worker.wait_for_heartbeat(lambda heartbeat: heartbeat.last_pulled == sequences[-1])


@pytest.mark.parametrize("emitted", [(), (5, 6, 7)])
async def test_handover_behind_undelivered_steps_continues_where_the_gateway_is(
    make_worker: MakeWorker, gateway: TestGateway, emitted: tuple[int, ...]
) -> None:
    worker = await make_worker(simulate=2.0)
    consumer = worker.worker.consumer
    answer = await gateway.publish(gateway.request(sampling=ENDLESS, emitted=emitted))
    await answer.wait_for_tokens(3)
    [held] = consumer._held
    assert held.sequence is not None
    num_known = held.sequence.num_output_tokens
    deadline = time.monotonic() + 5.0
    while held.sequence.num_output_tokens < num_known + 2:
        assert time.monotonic() < deadline
        time.sleep(0.001)  # noqa: ASYNC251 - the engine goes on while the event loop delivers nothing
    consumer._interactive.give_back(held)
    await answer.wait()
    assert answer.finish.reason == "handoff"
    assert answer.deltas[-1].seq == len(emitted) + len(answer.token_ids)


@pytest.mark.parametrize("is_older", [True, False])
async def test_of_two_workers_of_one_name_the_newer_ends(
    worker: RunningWorker, gateway: TestGateway, is_older: bool
) -> None:
    own = await worker.wait_for_heartbeat(lambda heartbeat: True)
    other = msgspec.structs.replace(own, started=own.started + (-1 if is_older else 1), pid=own.pid + 1)
    await gateway.nats.publish(worker_subject(own.model, own.worker), encode(other))
    await gateway.nats.publish(worker_subject(own.model, own.worker), b"\xc1")
    if is_older:
        await wait_until(worker.worker.has_failed.is_set)
    else:
        await worker.wait_for_heartbeat(lambda heartbeat: heartbeat.pid == own.pid)
        assert (await gateway.ask()).finish.reason == "length"
        assert not worker.worker.has_failed.is_set()


@pytest.mark.parametrize("wrong_by_s", [3600.0, -3600.0])
async def test_worker_whose_clock_is_wrong_ends_requests_at_their_deadlines(
    make_worker: MakeWorker, gateway: TestGateway, monkeypatch: pytest.MonkeyPatch, wrong_by_s: float
) -> None:
    true_time = time.time
    monkeypatch.setattr(time, "time", lambda: true_time() + wrong_by_s)
    await make_worker()
    assert (await gateway.ask(deadline=true_time() + 60)).finish.reason == "length"
    assert (await gateway.ask(deadline=true_time() - 1)).finish.reason == "expired"
    long = Sampling(max_tokens=4000, ignore_eos=True)
    assert (await gateway.ask(deadline=true_time() + 1, sampling=long)).finish.reason == "expired"
    for number, finish in ((60, "length"), (-1, "expired")):
        sampling, name = Sampling(max_tokens=2, ignore_eos=True), f"{gateway.model}{number}"
        deadline = true_time() + number
        job = gateway.request(id=name, lane="batch", tenant="acme", reply=None, deadline=deadline, sampling=sampling)
        await gateway.publish_job(job)
        assert (await gateway.result(name)).finish == finish
