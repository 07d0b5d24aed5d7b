"""What is sent in which order, and what is acknowledged; the connection is in memory."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import msgspec
import pytest
from nats.errors import ConnectionReconnectingError

from gpu_worker.consumer import outbox as module
from gpu_worker.consumer.outbox import Outbox
from gpu_worker.consumer.queued_message import ACK, QueuedMessage
from shared.messages import Delta, Finish, Frame, TokenLogprob, encode
from shared.task_supervisor import TaskSupervisor

MAX_PAYLOAD = 2000


@dataclass
class Connection:
    """A NATS connection on which some subjects cannot be reached."""

    broken: set[str] = field(default_factory=set)
    sent: list[tuple[str, bytes]] = field(default_factory=list)
    max_payload: int = MAX_PAYLOAD
    num_sent_at_flush: list[int] = field(default_factory=list)
    flush_timeouts_s: list[float] = field(default_factory=list)
    writable: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_writable(self) -> bool:
        return self.writable.is_set()

    async def flush(self, timeout_s: float) -> None:
        self.num_sent_at_flush.append(len(self.sent))
        self.flush_timeouts_s.append(timeout_s)

    async def wait_writable(self) -> None:
        await self.writable.wait()

    def send(self, subject: str, payload: bytes) -> None:
        if subject in self.broken:
            raise OSError("the connection is away")
        self.sent.append((subject, payload))

    def frames(self, subject: str) -> list[Frame]:
        return [msgspec.msgpack.decode(payload, type=Frame) for to, payload in self.sent if to == subject]

    @property
    def acknowledged(self) -> list[str]:
        return [subject for subject, payload in self.sent if payload == ACK]


class Gateways:
    """Which gateways listen, and what could not be sent to them."""

    def __init__(self) -> None:
        self.absent: set[str] = set()
        self.unsent: list[Delta] = []
        self.too_large: list[Delta] = []
        self.report_unsent = self.unsent.extend
        self.report_too_large = self.too_large.append

    def has(self, subject: str) -> bool:
        return subject not in self.absent


@pytest.fixture
def connection() -> Connection:
    return Connection()


@pytest.fixture
def gateways() -> Gateways:
    return Gateways()


@pytest.fixture
def outbox(connection: Connection, gateways: Gateways) -> Outbox:
    return Outbox(connection, "w", TaskSupervisor(), gateways, gateways)  # type: ignore[arg-type]


def message(name: str) -> QueuedMessage:
    return QueuedMessage("hr.req.m.interactive", b"", f"ack.{name}", 1, 1, 0)


async def test_message_is_acknowledged_after_its_last_delta_was_sent(outbox: Outbox, connection: Connection) -> None:
    outbox.put("hr.tok.a", Delta("a", 0, 0, (1,), "x", Finish("length")), message("a"))
    outbox.flush()
    assert [subject for subject, _ in connection.sent] == ["hr.tok.a", "ack.a"]


async def test_what_was_not_sent_is_not_acknowledged_and_its_neighbours_are(
    outbox: Outbox, connection: Connection, gateways: Gateways
) -> None:
    connection.broken.add("hr.tok.a")
    lost = Delta("a", 0, 0, (1,), "x", Finish("length"))
    outbox.put("hr.tok.a", lost, message("a"))
    outbox.put("hr.tok.b", Delta("b", 0, 0, (1,), "x", Finish("length")), message("b"))
    outbox.flush()
    assert connection.acknowledged == ["ack.b"]
    assert gateways.unsent == [lost]


async def test_frame_that_is_too_large_is_sent_in_parts_in_order(outbox: Outbox, connection: Connection) -> None:
    for position in range(20):
        outbox.put("hr.tok.a", Delta("a", 0, position, (position,), "x" * 400))
    outbox.flush()
    frames = connection.frames("hr.tok.a")
    assert len(frames) > 4
    assert [delta.seq for frame in frames for delta in frame.deltas] == list(range(20))
    assert all(len(payload) <= MAX_PAYLOAD for _, payload in connection.sent)


async def test_frame_of_just_the_greatest_size_is_sent(outbox: Outbox, connection: Connection) -> None:
    delta = Delta("a", 0, 0, (1,), "x")
    connection.max_payload = len(encode(Frame("w", 0, [delta])))
    outbox.put("hr.tok.a", delta)
    outbox.flush()
    assert [frame.deltas for frame in connection.frames("hr.tok.a")] == [[delta]]


async def test_delta_that_no_frame_holds_is_reported_and_its_neighbours_are_sent(
    outbox: Outbox, connection: Connection, gateways: Gateways
) -> None:
    huge = Delta("b", 0, 0, (1,), "x" * 5000)
    for delta in (Delta("a", 0, 0, (1,), "x"), huge, Delta("c", 0, 0, (1,), "x")):
        outbox.put("hr.tok.a", delta)
    outbox.flush()
    assert [delta.id for frame in connection.frames("hr.tok.a") for delta in frame.deltas] == ["a", "c"]
    assert gateways.too_large == [huge]


async def test_answers_to_the_queue_follow_the_deltas(outbox: Outbox, connection: Connection) -> None:
    outbox.answer(message("b"), b"-NAK")
    outbox.put("hr.tok.a", Delta("b", 0, 0, finish=Finish("handoff")))
    outbox.flush()
    assert [(subject, payload) for subject, payload in connection.sent][-1] == ("ack.b", b"-NAK")
    assert connection.frames("hr.tok.a")


async def test_what_is_put_in_is_sent_by_itself_with_what_comes_meanwhile(
    outbox: Outbox, connection: Connection
) -> None:
    outbox.start()
    connection.writable.set()
    for first in (0, 2):
        outbox.put("hr.tok.a", Delta("a", 0, first, (1,), "x"))
        outbox.put("hr.tok.a", Delta("a", 0, first + 1, (1,), "x"))
        await asyncio.sleep(0)
    assert [[delta.seq for delta in frame.deltas] for frame in connection.frames("hr.tok.a")] == [[0, 1], [2, 3]]


async def test_connection_that_takes_nothing_gets_one_frame_when_it_can(outbox: Outbox, connection: Connection) -> None:
    outbox.start()
    for position in range(3):
        outbox.put("hr.tok.a", Delta("a", 0, position, (1,), "x"))
        for _ in range(3):
            await asyncio.sleep(0)
    assert connection.sent == []
    connection.writable.set()
    for _ in range(5):
        await asyncio.sleep(0)
    assert [[delta.seq for delta in frame.deltas] for frame in connection.frames("hr.tok.a")] == [[0, 1, 2]]
    outbox.put("hr.tok.a", Delta("a", 0, 3, (1,), "x"))
    await asyncio.sleep(0)
    assert len(connection.frames("hr.tok.a")) == 2


async def test_close_sends_what_is_left_once(outbox: Outbox, connection: Connection) -> None:
    outbox.start()
    outbox.put("hr.tok.a", Delta("a", 0, 0, (1,), "x"))
    await asyncio.sleep(0)
    await outbox.close()
    assert len(connection.frames("hr.tok.a")) == 1
    outbox.put("hr.tok.a", Delta("a", 0, 1, (1,), "x"))
    connection.writable.set()
    for _ in range(5):
        await asyncio.sleep(0)
    assert len(connection.sent) == 1


async def test_deliver_sends_what_waits_before_it_asks_the_server(outbox: Outbox, connection: Connection) -> None:
    outbox.put("hr.tok.a", Delta("a", 0, 0, (1,), "x"))
    await outbox.deliver("hr.tok.a")
    assert connection.num_sent_at_flush == [1]
    # A gateway publishes it again after five seconds.
    assert connection.flush_timeouts_s == [module.DELIVERY_S]
    assert module.DELIVERY_S <= 2.5


async def test_what_is_sent_at_once_is_not_sent_again_at_the_end_of_the_turn(
    outbox: Outbox, connection: Connection
) -> None:
    connection.writable.set()
    outbox.start()
    outbox.put("hr.tok.a", Delta("a", 0, 0, (1,), "x", Finish("length")), message("a"))
    outbox.send_now()
    assert [subject for subject, _ in connection.sent] == ["hr.tok.a", "ack.a"]
    outbox.put("hr.tok.a", Delta("b", 0, 0, (1,), "y"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert [delta.id for frame in connection.frames("hr.tok.a") for delta in frame.deltas] == ["a", "b"]


async def test_nothing_is_sent_at_once_while_nats_does_not_read_or_after_the_end(
    outbox: Outbox, connection: Connection
) -> None:
    outbox.start()
    outbox.put("hr.tok.a", Delta("a", 0, 0, (1,), "x"))
    outbox.send_now()
    assert connection.sent == []
    connection.writable.set()
    await outbox.close()
    outbox.put("hr.tok.a", Delta("a", 0, 1, (1,), "y"))
    outbox.send_now()
    assert len(connection.frames("hr.tok.a")) == 1


async def test_what_nobody_hears_is_kept_in_order_until_somebody_does(
    outbox: Outbox, connection: Connection, gateways: Gateways
) -> None:
    gateways.absent.add("hr.tok.a")
    outbox.start()
    connection.writable.set()
    for position in range(3):
        outbox.put("hr.tok.a", Delta("a", 0, position, (position,), "x"))
        outbox.put("hr.tok.b", Delta("b", 0, position, (position,), "x"))
        await asyncio.sleep(0)
    outbox.put("hr.tok.a", Delta("a", 0, 3, finish=Finish("length")), message("a"))
    await asyncio.sleep(0)
    assert [frame.deltas[0].seq for frame in connection.frames("hr.tok.b")] == [0, 1, 2]
    assert connection.frames("hr.tok.a") == []
    assert connection.acknowledged == []
    assert outbox.replies == ["hr.tok.a"]
    gateways.absent.clear()
    outbox.send_kept()
    await asyncio.sleep(0)
    assert [delta.seq for frame in connection.frames("hr.tok.a") for delta in frame.deltas] == [0, 1, 2, 3]
    assert connection.acknowledged == ["ack.a"]


async def test_claim_that_nobody_would_hear_is_not_delivered(
    outbox: Outbox, connection: Connection, gateways: Gateways
) -> None:
    gateways.absent.add("hr.tok.a")
    outbox.put("hr.tok.a", Delta("a", 0, 0))
    with pytest.raises(ConnectionReconnectingError):
        await outbox.deliver("hr.tok.a")
    await outbox.close()
    assert len(connection.frames("hr.tok.a")) == 1


async def test_claim_is_delivered_while_another_gateway_is_away(
    outbox: Outbox, connection: Connection, gateways: Gateways
) -> None:
    gateways.absent.add("hr.tok.b")
    outbox.put("hr.tok.b", Delta("b", 0, 0))
    outbox.put("hr.tok.a", Delta("a", 0, 0))
    await outbox.deliver("hr.tok.a")
    assert connection.num_sent_at_flush == [1]
    assert outbox.replies == ["hr.tok.b"]


async def test_what_is_withdrawn_is_never_sent_and_what_waits_beside_it_is(
    outbox: Outbox, connection: Connection, gateways: Gateways
) -> None:
    gateways.absent |= {"hr.tok.a", "hr.tok.b", "hr.tok.d"}
    for delta in (Delta("a", 0, 0), Delta("b", 0, 0, (1,), "x"), Delta("a", 1, 0)):
        outbox.put("hr.tok.a", delta)
    outbox.put("hr.tok.b", Delta("a", 0, 0))
    outbox.put("hr.tok.d", Delta("a", 0, 0, (1,), "x", Finish("length")), message("a"))
    outbox.flush()
    outbox.withdraw("hr.tok.a", "a", 0)
    outbox.withdraw("hr.tok.b", "a", 0)
    outbox.withdraw("hr.tok.c", "a", 0)
    outbox.withdraw("hr.tok.d", "a", 0)
    await outbox.close()
    (frame,) = connection.frames("hr.tok.a")
    assert [(delta.id, delta.epoch) for delta in frame.deltas] == [("b", 0), ("a", 1)]
    assert connection.frames("hr.tok.b") == []
    # What was computed to its end stays in no queue.
    assert connection.acknowledged == ["ack.a"]


async def test_only_so_many_bytes_are_kept_and_who_has_most_of_them_loses_them(
    outbox: Outbox, connection: Connection, gateways: Gateways, monkeypatch: pytest.MonkeyPatch
) -> None:
    top = tuple(TokenLogprob(token, "x" * 8, b"x" * 8, -1.5) for token in range(20))
    deltas = [Delta("a", 0, n, (1,), "x", logprobs=(TokenLogprob(1, "x", b"x", -0.5, top),)) for n in range(4)]
    size = len(encode(deltas[0]))
    monkeypatch.setattr(module, "MAX_KEPT_BYTES", 5 * size)
    gateways.absent |= {"hr.tok.a", "hr.tok.b"}
    outbox.start()
    connection.writable.set()
    outbox.put("hr.tok.b", Delta("b", 0, 0, (1,), "x" * size))  # a bit more than `size`
    for delta in deltas:
        assert gateways.unsent == []
        outbox.put("hr.tok.a", delta)
        await asyncio.sleep(0)
    assert gateways.unsent == deltas
    assert outbox.replies == ["hr.tok.b"]
    assert connection.sent == []


async def test_what_is_withdrawn_makes_room_for_what_is_kept(
    outbox: Outbox, connection: Connection, gateways: Gateways, monkeypatch: pytest.MonkeyPatch
) -> None:
    deltas = [Delta(request_id, 0, 0, (1,), "x" * 100) for request_id in "abc"]
    monkeypatch.setattr(module, "MAX_KEPT_BYTES", 2 * len(encode(deltas[0])))
    gateways.absent |= {"hr.tok.a", "hr.tok.b"}
    for delta in deltas[:2]:
        outbox.put("hr.tok.a", delta)
    outbox.flush()
    outbox.withdraw("hr.tok.a", "a", 0)
    outbox.put("hr.tok.a", deltas[2])
    outbox.flush()
    assert gateways.unsent == []
    await outbox.close()
    assert [delta.id for frame in connection.frames("hr.tok.a") for delta in frame.deltas] == ["b", "c"]
