"""After NATS was away, frames wait for those who are to get them; a real server says who listens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from nats.aio.msg import Msg

from gpu_worker.consumer import frame_subscribers as module
from gpu_worker.consumer.frame_subscribers import FrameSubscribers
from shared.direct_client import DirectClient
from shared.nats_connection import connect
from tests.gpu_worker.consumer.harness import fresh_name, wait_until


class Watched:
    """Subscribers, the subjects of two gateways, and how often something was found."""

    def __init__(self, worker: DirectClient) -> None:
        self.nats = worker
        self.subscribers = FrameSubscribers(worker, "w")
        self.present, self.absent = fresh_name("hr.tok.a"), fresh_name("hr.tok.b")
        self.num_found = 0
        self._searches: list[asyncio.Task[None]] = []

    def reconnected(self, *subjects: str) -> None:
        self._searches.append(asyncio.create_task(self._count(self.subscribers.reconnected(subjects))))

    async def _count(self, found: AsyncIterator[None]) -> None:
        async for _ in found:
            self.num_found += 1

    @property
    def heard(self) -> list[bool]:
        return [self.subscribers.has(subject) for subject in (self.present, self.absent)]


@pytest.fixture
async def gateway(nats_url: str) -> AsyncIterator[DirectClient]:
    nats = await connect(nats_url, role="gateway", name="g")
    yield nats
    await nats.close()


@pytest.fixture
async def watched(nats_url: str, gateway: DirectClient) -> AsyncIterator[Watched]:
    nats = await connect(nats_url, role="worker", name="w")
    watched = Watched(nats)
    await watched.subscribers.start()
    await gateway.subscribe(watched.present)
    await gateway.flush()
    yield watched
    await nats.close()


async def test_nobody_is_heard_while_nats_is_away_and_those_who_listen_are_found_at_once(watched: Watched) -> None:
    assert watched.heard == [True, True]
    watched.subscribers.disconnected()
    assert watched.heard == [False, False]
    watched.reconnected(watched.present, watched.absent)
    assert watched.heard == [False, False]
    await wait_until(lambda: watched.num_found > 0)
    assert watched.heard == [True, False]


async def test_who_listens_later_is_found_later(watched: Watched, gateway: DirectClient) -> None:
    questions: list[bytes] = []

    async def receive(message: Msg) -> None:
        questions.append(message.data)

    watched.reconnected(watched.present, watched.absent)
    await wait_until(lambda: watched.num_found > 0)
    assert watched.heard == [True, False]
    await gateway.subscribe(watched.absent, cb=receive)
    await wait_until(lambda: watched.heard == [True, True])
    assert len(questions) == 1
    # However often they were looked for.
    await wait_until(lambda: watched.num_found >= 2)
    assert watched.num_found <= 3


async def test_who_never_listens_is_given_up(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GIVE_UP_S", 0.1)
    questions: list[str] = []
    send = watched.nats.send

    def note(subject: str, payload: bytes, reply: str = "") -> None:
        questions.append(subject)
        send(subject, payload, reply)

    monkeypatch.setattr(watched.nats, "send", note)
    watched.reconnected(watched.absent)
    await wait_until(lambda: watched.heard == [True, True])
    # What was kept for them goes out.
    assert watched.num_found == 1
    assert 1 <= len(questions) <= 5


async def test_nats_that_does_not_answer_is_waited_for_no_longer_than_a_gateway(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def leave_unanswered(future: asyncio.Future[bool] | None = None) -> None:
        pass

    monkeypatch.setattr(module, "GIVE_UP_S", 0.1)
    monkeypatch.setattr(watched.nats, "_send_ping", leave_unanswered)
    watched.reconnected(watched.present)
    assert watched.heard == [False, True]
    await wait_until(lambda: watched.heard == [True, True], 2)


async def test_search_begins_anew_with_each_connection(watched: Watched) -> None:
    watched.reconnected(watched.present)
    watched.subscribers.disconnected()
    await asyncio.sleep(0.1)
    assert watched.heard == [False, False]
    assert watched.num_found == 0
    watched.reconnected(watched.present)
    await wait_until(lambda: watched.heard == [True, True])


async def test_connection_that_is_lost_unannounced_reaches_nobody(watched: Watched) -> None:
    await watched.nats.close()
    assert watched.heard == [False, False]


class AnsweredByHand:
    """A connection of which the test says when NATS has answered, and what."""

    is_connected = True

    def __init__(self) -> None:
        self.questions: list[str] = []
        self.answered: asyncio.Queue[None] = asyncio.Queue()
        self.receive: Callable[[Any], None] = lambda message: None

    def new_inbox(self) -> str:
        return "_INBOX_worker.x"

    async def subscribe_direct(self, subject: str, callback: Callable[[Any], None]) -> None:
        self.receive = callback

    def send(self, subject: str, payload: bytes, reply: str) -> None:
        self.questions.append(reply)

    async def flush(self, timeout_s: float) -> None:
        await self.answered.get()

    def nobody_listens(self, question: int) -> None:
        self.receive(SimpleNamespace(subject=self.questions[question], headers={"Status": "503"}))


async def _first(found: AsyncIterator[None]) -> None:
    await anext(found)


async def test_late_answer_to_an_earlier_question_says_nothing_of_this_one() -> None:
    nats = AnsweredByHand()
    subscribers = FrameSubscribers(cast("Any", nats), "w")
    await subscribers.start()
    search = asyncio.create_task(_first(subscribers.reconnected(["hr.tok.a"])))
    await wait_until(lambda: len(nats.questions) == 1)
    nats.nobody_listens(0)
    nats.answered.put_nowait(None)
    await wait_until(lambda: len(nats.questions) == 2)
    assert not subscribers.has("hr.tok.a")
    nats.nobody_listens(0)
    nats.answered.put_nowait(None)
    await search
    assert subscribers.has("hr.tok.a")
    assert len(nats.questions) == 2
