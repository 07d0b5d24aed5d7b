"""When requests of people that may kill workers begin, and what waits for them; nothing is computed."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from nats.errors import ConnectionClosedError

from gpu_worker.consumer import interactive_lane
from gpu_worker.consumer.held_request import HeldRequest, HeldRequests
from gpu_worker.consumer.interactive_lane import InteractiveLane
from gpu_worker.consumer.queued_message import ACK, REDELIVER_SOON, QueuedMessage
from shared.messages import Delta, Request, encode

REPLY = "hr.tok.gw"


class Outbox:
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.answered: list[tuple[int, bytes]] = []
        self.withdrawn: list[str] = []
        self.deliver_error: Exception | None = None

    def put(self, reply: str, delta: Delta, finished: QueuedMessage | None = None) -> None:
        pass

    def answer(self, message: QueuedMessage, how: bytes = ACK) -> None:
        self.answered.append((message.stream_seq, how))

    def withdraw(self, reply: str, request_id: str, epoch: int) -> bool:
        self.withdrawn.append(request_id)
        return True

    async def deliver(self, reply: str) -> None:
        await asyncio.sleep(0)
        if self.deliver_error is not None:
            raise self.deliver_error


class Line:
    """A lane of which a test says what the engine does."""

    def __init__(self) -> None:
        self.held, self.outbox = HeldRequests(), Outbox()
        self.begun: list[str] = []
        intake: Any = SimpleNamespace(
            begin=lambda held, lane: self.begun.append(held.request.id), leaves_to_others=lambda request: False
        )
        nothing: Any = None
        outbox: Any = self.outbox
        self.lane = InteractiveLane(intake, nothing, self.held, lambda lane: outbox, lambda: None)
        self._num_taken = 0

    def take(self, name: str, probation: int = 0, emitted: tuple[int, ...] = ()) -> None:
        request = Request(id=name, model="m", text="x", reply=REPLY, probation=probation, emitted=emitted)
        self._num_taken += 1
        self.lane.take(QueuedMessage("s", encode(request), "ack", self._num_taken, 1, 0))

    def write(self, name: str, num_tokens: int) -> None:
        held = self[name]
        self.lane.advance(held, Delta(name, 0, held.num_output_tokens, tuple(range(num_tokens)), "x"))

    def __getitem__(self, name: str) -> HeldRequest:
        held = self.held.get(name)
        assert held is not None
        return held


@pytest.fixture
async def line() -> Line:
    return Line()


async def test_second_suspect_waits_until_the_first_has_produced_all_its_tokens(line: Line) -> None:
    line.take("first", probation=5)
    line.write("first", 4)
    line.take("second", probation=1)
    assert (line.begun, line.outbox.answered) == (["first"], [(2, REDELIVER_SOON)])
    line.write("first", 1)
    line.take("second", probation=1)
    assert line.begun == ["first", "second"]


async def test_new_requests_wait_for_a_suspect_that_waits_for_others_and_streams_do_not(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    line.take("untried")
    line.take("suspect", probation=1)
    line.take("new")
    line.take("stream", emitted=(1, 2))
    assert (line.begun, line.outbox.answered) == (["untried", "stream"], [(2, REDELIVER_SOON), (3, REDELIVER_SOON)])
    # It may have gone to another worker.
    monkeypatch.setattr(interactive_lane, "RESERVED_S", -1.0)
    line.take("suspect", probation=1)
    line.take("new")
    assert line.begun == ["untried", "stream", "new"]


async def test_new_requests_begin_as_soon_as_the_suspect_that_they_waited_for_is_none(line: Line) -> None:
    line.take("untried")
    line.take("suspect", probation=1)
    line.write("untried", 1)
    line.take("suspect", probation=1)
    assert (line.begun, line.held.has_suspect) == (["untried", "suspect"], True)
    line.write("suspect", 1)
    assert not line.held.has_suspect
    line.take("new")
    assert line.begun[-1] == "new"


async def test_suspect_that_is_cancelled_while_its_claim_is_sent_is_let_go_once(line: Line) -> None:
    line.take("suspect", probation=1)
    line.outbox.deliver_error = ConnectionClosedError()
    announcing = asyncio.create_task(line.lane.announce(line["suspect"]))
    await asyncio.sleep(0)
    line.lane.drop(line["suspect"])
    assert not await announcing
    assert (line.outbox.answered, line.outbox.withdrawn, line.held.has_suspect) == ([(1, ACK)], [], False)
