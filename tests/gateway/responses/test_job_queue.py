"""What is said when the queue of background responses cannot do what is asked. NATS is in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock

import msgspec
import nats.errors
import pytest
from nats.js.api import PubAck, RawStreamMsg
from nats.js.errors import APIError, NoStreamResponseError, NotFoundError, ServerError

from gateway.errors import ApiError
from gateway.responses import job_queue as job_queue_module
from gateway.responses.job import BackgroundJob
from gateway.responses.job_queue import JobQueue, JobRef, JobState
from shared.batch_progress import BatchProgress
from shared.direct_client import DirectClient
from shared.messages import Request
from shared.server_clock import ServerClock
from shared.subjects import cancel_subject

REF = JobRef("t", "m", "resp_1", BackgroundJob(stream_seq=7, deadline=0.0))
REQUEST = Request(id="resp_1", model="m", tenant="t", lane="batch", text="x")


class Wire:
    """A connection that fails as it is told."""

    max_payload = 1000

    def __init__(self) -> None:
        self.failure: Exception | None = None
        self.timeout_s: float | None = None
        self.deleted: list[int] = []
        self.sent: list[str] = []
        self.published: list[str] = []
        self.subscribed: set[str] = set()

    def jetstream(self, timeout: float | None = None) -> Wire:
        self.timeout_s = timeout
        return self

    async def publish(self, subject: str, payload: bytes, headers: dict[str, str] | None = None) -> Any:
        if self.failure is not None:
            raise self.failure
        self.published.append(subject)
        return PubAck(stream="s", seq=1)

    async def get_last_msg(self, stream: str, subject: str, direct: bool = False) -> Any:
        raise self.failure or NotFoundError

    async def request(self, subject: str, timeout: float) -> Any:
        raise self.failure or nats.errors.TimeoutError

    async def delete_msg(self, stream: str, number: int) -> None:
        self.deleted.append(number)

    async def subscribe_direct(self, subject: str, handler: object) -> Any:
        self.subscribed.add(subject)

        async def unsubscribe() -> None:
            self.subscribed.discard(subject)

        return SimpleNamespace(unsubscribe=unsubscribe)

    def send(self, subject: str, payload: bytes) -> None:
        self.sent.append(subject)


@pytest.fixture
def wire() -> Wire:
    return Wire()


@pytest.fixture
def queue(wire: Wire) -> JobQueue:
    return JobQueue(wire, ServerClock())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("failure", "answer"),
    [
        (NoStreamResponseError(), (400, "background_unavailable", "background", None)),
        (nats.errors.MaxPayloadError(), (413, "request_too_large", None, None)),
        (ServerError(code=503, err_code=10077), (503, "queue_full", None, 30.0)),
        (nats.errors.TimeoutError(), (503, "queue_unavailable", None, 2.0)),
    ],
)
async def test_job_that_cannot_be_published_is_refused_with_the_reason(
    queue: JobQueue, wire: Wire, failure: Exception, answer: tuple[object, ...]
) -> None:
    wire.failure = failure
    with pytest.raises(ApiError) as caught:
        await queue.publish(REQUEST)
    error = caught.value
    assert (error.status, error.code, error.param, error.retry_after_s) == answer


@pytest.mark.parametrize(
    ("ask", "is_running"),
    [(getattr(JobQueue, name), False) for name in ("result", "state", "cancel", "forget")] + [(JobQueue.cancel, True)],
)
@pytest.mark.parametrize("failure", [nats.errors.TimeoutError(), ServerError(code=503)])
async def test_queue_that_does_not_answer_is_a_503(
    queue: JobQueue,
    wire: Wire,
    ask: Callable[[JobQueue, JobRef], Awaitable[object]],
    is_running: bool,
    failure: Exception,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wire.failure = failure
    if is_running:
        monkeypatch.setattr(JobQueue, "state", AsyncMock(return_value=JobState(True, "so far")))
    with pytest.raises(ApiError) as caught:
        await ask(queue, REF)
    assert (caught.value.status, caught.value.code, caught.value.retry_after_s) == (503, "queue_unavailable", 2.0)
    # No call waits for NATS as long as its client would.
    assert wire.timeout_s == 3.0


async def test_job_without_a_result_long_after_its_deadline_has_expired(queue: JobQueue) -> None:
    result = await queue.result(REF)
    assert result is not None
    assert (result.id, result.model, result.tenant, result.finish) == ("resp_1", "m", "t", "expired")


async def test_job_waits_in_the_queue_of_background_responses(queue: JobQueue, wire: Wire) -> None:
    assert await queue.publish(REQUEST) == 1
    assert wire.published == ["hr.req.m.background.t"]


async def test_jobs_beyond_the_subscriptions_of_a_connection_are_not_watched(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_queue_module, "MAX_WATCHES", 2)
    queue = JobQueue(cast("DirectClient", wire), ServerClock())
    watches = [await queue.watch("t", f"r{number}") for number in range(3)]
    assert [watch.is_subscribed for watch in watches] == [True, True, False]
    assert wire.subscribed == {f"hr.{kind}.t.r{number}" for kind in ("progress", "stored") for number in (0, 1)}
    for watch in watches * 2:
        await queue.unwatch(watch)
    assert not wire.subscribed
    assert [(await queue.watch("t", "r3")).is_subscribed for _ in range(3)] == [True, True, False]


async def test_watch_that_is_given_up_while_it_begins_counts_no_more(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_queue_module, "MAX_WATCHES", 1)
    subscribe = wire.subscribe_direct

    async def give_up(subject: str, handler: object) -> Any:
        if "stored" in subject:
            raise asyncio.CancelledError
        return await subscribe(subject, handler)

    queue = JobQueue(cast("DirectClient", wire), ServerClock())
    with monkeypatch.context() as broken:
        broken.setattr(wire, "subscribe_direct", give_up)
        with pytest.raises(asyncio.CancelledError):
            await queue.watch("t", "r")
    assert not wire.subscribed
    assert (await queue.watch("t", "r")).is_subscribed


async def test_progress_of_another_message_under_the_same_id_is_none_of_the_job(
    queue: JobQueue, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(JobQueue, "_is_taken", AsyncMock(return_value=False))
    stored = BatchProgress(b"", REF.job.stream_seq, "", 0, (), "own")

    async def get_last_msg(stream: str, subject: str) -> RawStreamMsg:
        return RawStreamMsg(data=msgspec.msgpack.encode(stored))

    monkeypatch.setattr(wire, "get_last_msg", get_last_msg)
    assert await queue.state(REF) == JobState(True, "own")
    stored = BatchProgress(b"", REF.job.stream_seq - 1, "", 0, (), "another's")
    assert await queue.state(REF) == JobState(False)


async def test_job_that_has_just_ended_is_not_cancelled_any_more(
    queue: JobQueue, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(JobQueue, "_is_taken", AsyncMock(return_value=False))
    await queue.cancel(REF)
    assert (wire.deleted, wire.sent) == ([7], [cancel_subject("m")])

    async def publish(*arguments: object, **options: object) -> None:
        raise APIError(err_code=10071)

    monkeypatch.setattr(wire, "publish", publish)
    await queue.cancel(REF)
    assert (wire.deleted, wire.sent) == ([7], [cancel_subject("m")])
