"""How a worker pulls: what is counted as still to come, whatever ends a pull. NATS is in memory."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from nats.aio.msg import Msg

from gpu_worker.consumer import pull_queue
from gpu_worker.consumer.pull_queue import PullQueue
from gpu_worker.consumer.queued_message import REDELIVER, QueuedMessage
from shared.consumers import PullConsumer
from shared.direct_client import DirectClient
from shared.errors import DependencyError
from shared.messages import encode
from shared.pause_detector import PauseDetector
from shared.sampling import Sampling
from shared.subjects import request_subject
from shared.task_supervisor import TaskSupervisor
from tests.gpu_worker.consumer.harness import MakeWorker, TestGateway, wait_until


class Wire:
    """A connection, its one subscription, and a lane with a capacity that the test sets."""

    is_connected = True
    unless_lost = DirectClient.unless_lost

    def __init__(self) -> None:
        self.tasks = TaskSupervisor()
        self.lost_callbacks: set[Callable[[], None]] = set()
        self.sent: list[tuple[str, bytes]] = []
        self.taken: list[QueuedMessage] = []
        self.failure: Exception | None = None
        self.capacity = 8
        self.num_ensured = 0
        self.refusals = 0
        self.receive: Callable[[Msg], None] = lambda message: None
        self.queue = PullQueue(
            self,  # type: ignore[arg-type]
            "S",
            self.ensure,
            lambda: self.capacity,
            self.taken.append,
            self.tasks,
        )

    def new_inbox(self) -> str:
        return "inbox"

    async def subscribe_direct(self, subject: str, callback: Callable[[Msg], None]) -> Wire:
        self.receive = callback
        return self

    async def drain(self) -> None:
        pass

    async def ensure(self) -> PullConsumer:
        if self.refusals:
            self.refusals -= 1
            raise DependencyError("this login may not")
        self.num_ensured += 1
        return PullConsumer("c", f"group {self.num_ensured}")

    def send(self, subject: str, payload: bytes, reply: str = "") -> None:
        if self.failure is not None:
            raise self.failure
        self.sent.append((subject, payload))

    @property
    def pulls(self) -> list[int]:
        return [json.loads(body)["batch"] for subject, body in self.sent if subject == "$JS.API.CONSUMER.MSG.NEXT.S.c"]

    def end_pull(self, status: str, unfilled: int | None = None) -> None:
        headers = {"Status": status} | ({} if unfilled is None else {"Nats-Pending-Messages": str(unfilled)})
        self.receive(Msg(None, subject="inbox", headers=headers))  # type: ignore[arg-type]

    def bring(self, number: int, num_pending: int = 0, num_delivered: int = 1, **fields: Any) -> None:
        reply = f"$JS.ACK.S.c.{num_delivered}.{number}.{number}.1700000000000000000.{num_pending}"
        self.receive(Msg(None, subject="s", reply=reply, data=b"job", **fields))  # type: ignore[arg-type]

    async def settle(self) -> None:
        for _ in range(5):
            await asyncio.sleep(0)


@pytest.fixture
async def wire(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Wire]:
    monkeypatch.setattr(pull_queue, "_RETRY_WAIT_S", 0.001)
    wire = Wire()
    await wire.queue.start()
    await wire.settle()
    yield wire
    await wire.tasks.close()


async def test_room_is_pulled_for_and_small_rooms_wait_until_they_are_worth_it(wire: Wire) -> None:
    assert wire.pulls == [8]
    assert json.loads(wire.sent[0][1])["expires"] == pull_queue.PULL_EXPIRES_S * 1e9
    # What goes first is read behind all that was pulled for, so that is never much.
    for capacity, pulls in ((8, [8]), (9, [8]), (10, [8, 2]), (4, [8, 2]), (256, [8, 2, 22])):
        wire.capacity = capacity
        wire.queue.wake()
        await wire.settle()
        assert wire.pulls == pulls
    assert wire.queue.outstanding == 32


async def test_message_is_taken_and_counted_out(wire: Wire) -> None:
    wire.bring(41, num_pending=20)
    wire.bring(40, num_pending=19, num_delivered=3)
    assert [message.stream_seq for message in wire.taken] == [41, 40]
    assert (wire.queue.outstanding, wire.queue.last_pulled, wire.queue.num_redelivered) == (6, 41, 1)
    # Of the nineteen that are left six are on their way.
    assert wire.queue.backlog == 13


async def test_pull_that_expired_is_made_again_for_what_it_did_not_bring(wire: Wire) -> None:
    for number in range(5):
        wire.bring(number, num_pending=4)
    wire.capacity = 3
    wire.end_pull("408", 3)
    # That it expired says that the queue was empty.
    assert (wire.queue.outstanding, wire.queue.backlog) == (0, 0)
    await wire.settle()
    assert (wire.pulls, wire.queue.outstanding, wire.num_ensured) == ([8, 3], 3, 1)
    wire.end_pull("100")
    assert wire.queue.outstanding == 3
    # Others that are still open may bring something.
    wire.end_pull("408", 2)
    assert wire.queue.outstanding == 1


@pytest.mark.parametrize("status", ["409", "503"])
async def test_refused_pull_makes_sure_of_the_queue_before_the_next(
    wire: Wire, status: str, caplog: pytest.LogCaptureFixture
) -> None:
    wire.end_pull(status)
    assert wire.queue.outstanding == 0
    await wait_until(lambda: wire.pulls == [8, 8])
    assert (wire.num_ensured, wire.queue.outstanding) == (2, 8)
    # Somebody else has given the consumer another group.
    assert [json.loads(body)["group"] for _, body in wire.sent] == ["group 1", "group 2"]
    assert caplog.messages == ["pull refused"]


async def test_queue_that_cannot_be_made_is_told_and_tried_again(wire: Wire, caplog: pytest.LogCaptureFixture) -> None:
    wire.refusals = 2
    wire.end_pull("409")
    await wait_until(lambda: wire.pulls == [8, 8])
    assert caplog.messages == ["pull refused", *["queue is not available"] * 2]
    assert "may not" in vars(caplog.records[1])["error"]


async def test_queue_that_is_made_sure_of_as_the_connection_is_lost_is_back_with_it(wire: Wire) -> None:
    """A server that shuts down ends pulls, answers no call after that, and only then closes the connection."""
    ensure, has_asked = wire.ensure, asyncio.Event()

    async def no_answer() -> PullConsumer:
        has_asked.set()
        await asyncio.Event().wait()
        raise AssertionError

    wire.queue._ensure_consumer = no_answer
    wire.end_pull("409", 8)
    await has_asked.wait()
    wire.queue._ensure_consumer = ensure
    for lost in list(wire.lost_callbacks):
        lost()
    wire.queue.forget()
    await wait_until(lambda: wire.pulls == [8, 8])
    assert not wire.lost_callbacks


@pytest.mark.parametrize("is_empty", [False, True])
async def test_backlog_is_known_once_a_pull_is_answered(wire: Wire, is_empty: bool) -> None:
    for num_ensured in (1, 2):
        assert not wire.queue.knows_backlog
        if is_empty:
            wire.end_pull("408", 8)
        else:
            wire.bring(41)
        assert wire.queue.knows_backlog
        wire.queue.forget()
        assert not wire.queue.knows_backlog
        await wait_until(lambda num_ensured=num_ensured: wire.num_ensured == num_ensured + 1)  # type: ignore[misc]


async def test_numbers_of_a_queue_that_was_lost_say_nothing_of_the_one_after_it(wire: Wire) -> None:
    wire.bring(3_600_000_041)
    wire.queue.forget()
    await wait_until(lambda: wire.num_ensured == 2)
    assert wire.queue.last_pulled == 0
    wire.bring(41)
    assert (wire.queue.last_pulled, wire.queue.last_returned) == (41, 0)


async def test_pull_that_could_not_be_sent_is_tried_again(wire: Wire) -> None:
    wire.failure, wire.capacity = OSError("away"), 16
    wire.queue.wake()
    await wire.settle()
    assert wire.queue.outstanding == 0
    wire.failure = None
    await wait_until(lambda: wire.pulls == [8, 16])


class Clock:
    """A clock that the test moves, and the pauses that a queue detects by it."""

    def __init__(self) -> None:
        self.now = 0.0
        self.pauses = PauseDetector(pull_queue.PULL_EXPIRES_S, 0.5, self.read, self.read, self.read)

    def read(self) -> float:
        return self.now


async def test_time_before_the_start_is_no_pause() -> None:
    wire, clock = Wire(), Clock()
    wire.queue._pauses = clock.pauses
    clock.now += 60.0
    await wire.queue.start()
    await wire.settle()
    assert (wire.pulls, wire.queue.is_resting) == ([8], False)
    await wire.tasks.close()


async def test_time_in_which_nats_does_not_answer_is_no_pause(wire: Wire) -> None:
    clock = Clock()

    async def ensure_slowly() -> PullConsumer:
        clock.now += 5.0
        return await wire.ensure()

    wire.queue._pauses, wire.queue._ensure_consumer = clock.pauses, ensure_slowly
    wire.queue.forget()
    await wait_until(lambda: wire.num_ensured == 2)
    for paused_s, is_resting in ((0.0, False), (5.0, True)):
        clock.now += paused_s
        wire.queue.wake()
        await wire.settle()
        assert wire.queue.is_resting is is_resting


async def test_message_of_somebody_else_in_the_inbox_is_nothing(wire: Wire) -> None:
    wire.receive(Msg(None, subject="inbox", data=b"forged"))  # type: ignore[arg-type]
    assert (wire.taken, wire.queue.outstanding) == ([], 8)


async def test_what_comes_while_the_worker_drains_goes_back_to_the_queue(wire: Wire) -> None:
    await wire.queue.drain()
    wire.bring(7)
    wire.capacity = 16
    wire.queue.wake()
    await wire.settle()
    assert (wire.taken, wire.pulls, wire.queue.outstanding) == ([], [8], 0)
    [(subject, answer)] = wire.sent[1:]
    assert (subject.split(".")[5], answer) == ("7", REDELIVER)


async def test_pull_that_is_never_answered_and_a_reconnect_make_sure_of_the_queue(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    wire.queue._expires_at = asyncio.get_running_loop().time() - pull_queue._ANSWER_GRACE_S + 0.5
    wire.queue.wake()
    await wire.settle()
    assert wire.num_ensured == 1
    wire.queue._expires_at -= 1
    wire.queue.wake()
    await wire.settle()
    assert (wire.num_ensured, wire.pulls, wire.queue.outstanding) == (2, [8, 8], 8)
    wire.queue.forget()
    await wire.settle()
    assert (wire.num_ensured, wire.pulls, wire.queue.outstanding) == (3, [8, 8, 8], 8)


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
