"""How many streams follow background responses: each is counted from before its job is queued until it ends."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
from starlette.requests import ClientDisconnect

from gateway.admission.auth import Principal
from gateway.admission.caller import Caller
from gateway.api.answer import Answer, Asked, Outcome, ResponseHead, StreamParts
from gateway.api.endpoint import GenerationStart
from gateway.api.large_bodies import LargeBodies
from gateway.errors import ApiError
from gateway.responses import store as store_module
from gateway.responses.background import BackgroundStream
from gateway.responses.draft import ResponseGeneration
from gateway.responses.endpoint import ResponsesEndpoint
from gateway.responses.job import JobWatch
from gateway.responses.job_queue import JobRef, JobState
from gateway.responses.log import ResponseRecord
from gateway.responses.store import ResponseStore
from gateway.responses.stored import _FollowingStream
from gateway.streams.event_stream import EventStreamLimits
from shared.messages import BatchResult, Request
from shared.server_clock import ServerClock
from tests.gateway.responses.test_background_stream import RECORD

PRINCIPAL = Principal("key", "t")


class Queue:
    """Takes jobs when the test lets it, and has the result of each at once. As a log it takes everything."""

    def __init__(self) -> None:
        self.clock = ServerClock()
        self.is_open = asyncio.Event()
        self.has_results = True
        self.published: list[str] = []
        self.watches: set[JobWatch] = set()

    async def publish(self, request: Request) -> int:
        await self.is_open.wait()
        self.published.append(request.id)
        return len(self.published)

    async def watch(self, tenant: str, response_id: str) -> JobWatch:
        self.watches.add(watch := JobWatch())
        return watch

    async def unwatch(self, watch: JobWatch) -> None:
        self.watches.discard(watch)

    async def result(self, ref: JobRef) -> BatchResult | None:
        return BatchResult(id="j", model="m", tenant="t", text="x", finish="stop") if self.has_results else None

    async def state(self, ref: JobRef) -> JobState:
        return JobState(False)

    async def put(self, record: ResponseRecord) -> None:
        pass


class Edge:
    """The endpoint, and clients whose answers it starts as the service does."""

    def __init__(self) -> None:
        self.queue = Queue()
        self.store = ResponseStore(cast("Any", self.queue), cast("Any", self.queue))
        self.endpoint = ResponsesEndpoint(self.store, LargeBodies())
        self.sent: list[bytes] = []
        self.answers: list[Answer] = []

    async def _checked(self, generation: ResponseGeneration, load: object, tenant: str) -> ResponseGeneration:
        return generation

    async def ask(self) -> None:
        """Ask for a background response as a stream, until it has ended."""
        body = b'{"model":"m","input":"x","background":true,"stream":true}'
        generation = await self.endpoint.generation(body, PRINCIPAL)
        exchange = SimpleNamespace(
            disconnected=False, paused_since=None, started=True, write=self.sent.append, finish=self.sent.append
        )
        asked = Asked(cast("Any", exchange), generation, ResponseHead("r", 0.0), PRINCIPAL)
        flusher = cast("Any", SimpleNamespace(wake=lambda *_: None, discard=lambda *_: None))
        answer = self.endpoint.streamed_answer(asked, StreamParts(flusher, EventStreamLimits(), 0.0))
        self.answers.append(answer)
        try:
            starter = cast("Any", SimpleNamespace(checked=self._checked))
            caller = Caller("key", "t", [], body, "r", None)
            await self.endpoint.start(starter, GenerationStart(generation, cast("Any", None), answer, caller, False))
            await asyncio.wait_for(answer.done, 30)
        finally:
            answer.close()


@pytest.fixture
async def edge(monkeypatch: pytest.MonkeyPatch) -> Edge:
    monkeypatch.setattr(store_module, "MAX_FOLLOWERS", 2)
    return Edge()


async def test_streams_that_are_asked_for_at_once_are_refused_before_there_are_jobs(edge: Edge) -> None:
    asking = [asyncio.create_task(edge.ask()) for _ in range(3)]
    with pytest.raises(ApiError, match="follows 2 responses") as refusal:
        await asking[2]
    assert refusal.value.status == 429
    edge.queue.is_open.set()
    await asyncio.gather(*asking[:2])
    assert len(edge.queue.published) == 2
    assert not edge.store.followers
    assert not edge.queue.watches


async def test_stream_whose_client_leaves_before_it_is_queued_counts_no_more(edge: Edge) -> None:
    asking = asyncio.create_task(edge.ask())
    while not edge.store.followers:  # noqa: ASYNC110
        await asyncio.sleep(0)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    assert not edge.store.followers
    assert not edge.queue.watches


async def test_job_whose_client_has_left_when_it_is_queued_is_watched_no_more(edge: Edge) -> None:
    asking = asyncio.create_task(edge.ask())
    while not edge.queue.watches:  # noqa: ASYNC110
        await asyncio.sleep(0)
    edge.answers[0].end(Outcome.DISCONNECTED)
    edge.queue.is_open.set()
    await asking
    for _ in range(5):
        await asyncio.sleep(0)
    assert not edge.queue.watches


async def test_shutdown_ends_a_stream_whose_job_is_queued_right_after_it(edge: Edge) -> None:
    asking = asyncio.create_task(edge.ask())
    while not edge.store.followers:  # noqa: ASYNC110
        await asyncio.sleep(0)
    edge.queue.has_results = False
    edge.store.cut_followers(ApiError(503, "down", code="shutting_down", retry_after_s=1.0))
    edge.queue.is_open.set()
    await asking
    told = b"".join(edge.sent)
    assert told.index(b"response.queued") < told.index(b"shutting_down")


async def test_stored_response_that_is_followed_counts_until_its_stream_ends(edge: Edge) -> None:
    async def receive() -> Any:
        await asyncio.Event().wait()

    async def gone(message: Any) -> None:
        raise ConnectionError

    stream = _FollowingStream(BackgroundStream(RECORD, edge.store), edge.store)
    second = _FollowingStream(BackgroundStream(RECORD, edge.store), edge.store)
    with pytest.raises(ApiError, match="follows 2 responses"):
        _FollowingStream(BackgroundStream(RECORD, edge.store), edge.store)
    for one in (stream, second):
        with pytest.raises(ClientDisconnect):
            await one({"type": "http", "asgi": {"spec_version": "2.4"}}, receive, gone)
    assert not edge.store.followers
    assert not edge.queue.watches
