from __future__ import annotations

from shared.messages import encode
from shared.sampling import Sampling
from shared.subjects import request_subject
from tests.gpu_worker.consumer.harness import MakeWorker, TestGateway, wait_until

ENDLESS = Sampling(max_tokens=4000, ignore_eos=True)


async def test_what_had_begun_goes_before_what_came_before_it(make_worker: MakeWorker, gateway: TestGateway) -> None:
    worker = await make_worker(max_num_seqs=1)
    running = gateway.request(sampling=ENDLESS)
    await (await gateway.publish(running)).wait_for_tokens(1)
    new = [gateway.request() for _ in range(8)]
    for request in new:
        await gateway.publish(request)
    resumed = [gateway.request(epoch=1, emitted=(5, 6)) for _ in range(3)]
    for request in resumed:
        sequence = (await gateway.js.publish(request_subject(gateway.model, "resumed", "t"), encode(request))).seq
    await gateway.cancel(running.id)
    for request in (*new, *resumed):
        await gateway.answer(request.id, request.epoch).wait()
    ends = [delta for frame in gateway.frames for delta in frame.deltas if delta.finish is not None]
    ended = [delta.id for delta in ends if delta.id != running.id]
    # One new request is taken ahead of need, and one comes with the pull that finds the first resumed one.
    assert {request.id for request in resumed} <= set(ended[:5])
    beat = await worker.wait_for_heartbeat(lambda heartbeat: heartbeat.last_resumed == sequence)
    assert beat.last_pulled < sequence
    assert beat.queue_pending == 0


async def test_nothing_new_is_pulled_while_a_suspect_is_here(make_worker: MakeWorker, gateway: TestGateway) -> None:
    worker = await make_worker()
    suspect = gateway.request(epoch=1, emitted=(5,), probation=2000, sampling=ENDLESS)
    await gateway.js.publish(request_subject(gateway.model, "resumed", "t"), encode(suspect))
    await gateway.answer(suspect.id, 1).wait_for_tokens(1)
    queues = worker.worker.consumer._interactive_queues
    await wait_until(lambda: queues.new.outstanding == 0)  # what it had pulled for before has expired
    answer = await gateway.publish(gateway.request())
    moved = gateway.request(epoch=1, emitted=(5,))
    await gateway.js.publish(request_subject(gateway.model, "resumed", "t"), encode(moved))
    await gateway.answer(moved.id, 1).wait()
    assert (queues.new.last_pulled, queues.new.last_returned, answer.deltas) == (0, 0, [])
    await gateway.cancel(suspect.id)
    await answer.wait()
    assert queues.new.num_redelivered == 0


async def test_what_a_suspect_keeps_from_beginning_is_told_to_be_back_in_the_queue(
    make_worker: MakeWorker, gateway: TestGateway
) -> None:
    worker = await make_worker()
    suspect = gateway.request(epoch=1, emitted=(5,), probation=2000, sampling=ENDLESS)
    await gateway.js.publish(request_subject(gateway.model, "resumed", "t"), encode(suspect))
    await gateway.answer(suspect.id, 1).wait_for_tokens(1)
    other = gateway.request(epoch=1, probation=1)
    sequence = (await gateway.js.publish(request_subject(gateway.model, "resumed", "t"), encode(other))).seq
    beat = await worker.wait_for_heartbeat(lambda heartbeat: heartbeat.last_resumed_returned == sequence)
    assert (beat.last_resumed, beat.last_returned) == (sequence, 0)
    await gateway.cancel(suspect.id)
    await gateway.answer(other.id, 1).wait()


async def test_worker_that_was_paused_takes_only_what_others_have_no_room_for(
    make_worker: MakeWorker, gateway: TestGateway
) -> None:
    paused, well = await make_worker(), await make_worker(max_num_seqs=2)
    queues = paused.worker.consumer._interactive_queues
    for queue in (queues.resumed, queues.new):
        monotonic, boot = queue._pauses._last
        queue._pauses._last = (monotonic - 2.0, boot - 2.0)
    await wait_until(lambda: queues.resumed.is_resting and queues.new.is_resting)
    await wait_until(lambda: queues.resumed.outstanding == queues.new.outstanding == 0)
    for _ in range(2):
        moved = gateway.request(epoch=1, emitted=(5,), sampling=ENDLESS)
        await gateway.js.publish(request_subject(gateway.model, "resumed", "t"), encode(moved))
        answer = gateway.answer(moved.id, 1)
        await answer.wait_for_tokens(1)
        assert set(answer.workers) == {well.name}
    # One more is pulled ahead of need.
    answers = [await gateway.publish(gateway.request()) for _ in range(4)]
    await wait_until(lambda: sum(answer.finished.is_set() for answer in answers) >= 3)
    assert [set(answer.workers) for answer in answers if answer.finished.is_set()][:3] == [{paused.name}] * 3
    assert queues.new.is_resting


async def test_drained_worker_takes_from_neither_queue(make_worker: MakeWorker, gateway: TestGateway) -> None:
    worker = await make_worker()
    queues = worker.worker.consumer._interactive_queues
    await worker.drain()
    assert (queues.resumed.outstanding, queues.new.outstanding) == (0, 0)
    requests = {"resumed": gateway.request(epoch=1, emitted=(5,)), "interactive": gateway.request()}
    for queue, request in requests.items():
        await gateway.js.publish(request_subject(gateway.model, queue, "t"), encode(request))  # type: ignore[arg-type]
    second = await make_worker()
    answers = [await gateway.answer(request.id, request.epoch).wait() for request in requests.values()]
    assert {worker for answer in answers for worker in answer.workers} == {second.name}


async def test_nothing_new_is_pulled_before_it_is_known_what_goes_first(make_worker: MakeWorker) -> None:
    worker = await make_worker()
    queues = worker.worker.consumer._interactive_queues
    await wait_until(lambda: queues.knows_backlog)
    room = queues._room_for_new()
    assert room > 0
    # As after a restart of NATS, which answers the first pull when it has expired.
    queues.forget()
    assert queues._room_for_new() == 0
    await wait_until(lambda: queues.knows_backlog)
    assert queues._room_for_new() == room
    queues.resumed._last_pending = queues.resumed.outstanding + 1
    assert queues._room_for_new() == 0
