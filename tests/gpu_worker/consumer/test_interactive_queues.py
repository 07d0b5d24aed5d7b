from __future__ import annotations

from collections.abc import Awaitable, Callable

from shared.messages import encode
from shared.sampling import Sampling
from shared.subjects import request_subject
from tests.gpu_worker.consumer.harness import RunningWorker, TestGateway

MakeWorker = Callable[..., Awaitable[RunningWorker]]
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
    ended = [delta.id for frame in gateway.frames for delta in frame.deltas if delta.finish is not None]
    # One new request is taken ahead of need, and one comes with the pull that finds the first resumed one.
    assert {request.id for request in resumed} <= set(ended[:5])
    beat = await worker.wait_for_heartbeat(lambda heartbeat: heartbeat.last_resumed == sequence)
    assert beat.last_pulled < sequence
    assert beat.queue_pending == 0


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
