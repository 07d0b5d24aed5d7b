"""How a background response is followed, with states of its job that the test sets."""

from __future__ import annotations

import asyncio
import json
from typing import Any, cast

import pytest

from gateway.errors import ApiError
from gateway.responses import follower as follower_module
from gateway.responses.draft import ResponseDraft
from gateway.responses.follower import Follower
from gateway.responses.job import BackgroundJob
from gateway.responses.job_queue import JobQueue, JobRef, JobState
from gateway.responses.record import ResponseRecord
from gateway.responses.store import ResponseStore
from shared.messages import BatchResult

DRAFT = ResponseDraft(id="resp_" + 32 * "0", created_at=1, parameters=b"{}", input=[], is_background=True)
RECORD = ResponseRecord("t", "m", DRAFT, b"", BackgroundJob(stream_seq=1, deadline=0))


class Jobs:
    """What NATS would say of the job: one state after the other, the last for ever."""

    def __init__(self, *states: JobState | BatchResult | ApiError) -> None:
        self._states = list(states)

    async def result(self, ref: JobRef) -> BatchResult | None:
        if isinstance(self._states[0], ApiError):
            raise self._states[0]
        return self._states[0] if isinstance(self._states[0], BatchResult) else None

    async def state(self, ref: JobRef) -> JobState:
        state = self._states.pop(0) if len(self._states) > 1 else self._states[0]
        assert isinstance(state, JobState)
        return state


def result(text: str, **fields: Any) -> BatchResult:
    return BatchResult(**{"id": DRAFT.id, "model": "m", "tenant": "t", "text": text, "finish": "stop"} | fields)


def following(*states: JobState | BatchResult | ApiError) -> tuple[Follower, ResponseStore]:
    store = ResponseStore(cast("Any", None), cast("JobQueue", Jobs(*states)))
    return Follower(RECORD, store), store


async def events_of(follower: Follower) -> list[dict[str, Any]]:
    told = b"".join([piece async for piece in follower.events()]).decode()
    data = [line.removeprefix("data: ") for line in told.split("\n") if line.startswith(("data: ", ":"))]
    return [{"type": "comment"} if line.startswith(":") else json.loads(line) for line in data]


@pytest.fixture(autouse=True)
def _no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower_module, "FIRST_POLL_S", 0.001)
    monkeypatch.setattr(follower_module, "LAST_POLL_S", 0.001)


async def test_text_is_told_as_it_grows_and_once() -> None:
    text = "abc" * 50
    follower, store = following(JobState(False), JobState(True), JobState(True, text[:40]), JobState(True, text[:40]),
                                JobState(True, text[:130]), result(text))  # fmt: skip
    events = await events_of(follower)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta") == text
    assert events[-1]["response"]["status"] == "completed"
    assert not store.followers


async def test_text_that_was_computed_anew_ends_the_stream_with_an_error() -> None:
    follower, _ = following(JobState(True, "a" * 40), result("b" * 40))
    last = (await events_of(follower))[-1]
    assert (last["type"], last["code"], last["error"]["code"]) == ("error", "response_restarted", "response_restarted")


async def test_job_that_expired_without_its_text_keeps_what_was_told() -> None:
    follower, _ = following(JobState(True, "a" * 40), result("", finish="expired"))
    last = (await events_of(follower))[-1]
    assert (last["type"], last["response"]["error"]["code"]) == ("response.failed", "server_error")
    assert last["response"]["output"][0]["content"][0]["text"] == "a" * 40


async def test_silence_is_kept_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower_module, "_KEEP_ALIVE_S", 0.002)
    follower, _ = following(*[JobState(True)] * 8, result("x"))
    kinds = [event["type"] for event in await events_of(follower)]
    assert kinds.count("comment") >= 2
    assert kinds[-1] == "response.completed"


async def test_unreachable_queue_and_a_shutdown_end_the_stream_with_an_error() -> None:
    away, _ = following(ApiError(503, "away", code="queue_unavailable", retry_after_s=2.0))
    assert (await events_of(away))[-1]["code"] == "queue_unavailable"
    follower, store = following(JobState(True, "a" * 40))
    telling = asyncio.create_task(events_of(follower))
    while not store.followers:  # noqa: ASYNC110
        await asyncio.sleep(0)
    store.cut_followers(ApiError(503, "down", code="shutting_down", retry_after_s=1.0))
    assert (await telling)[-1]["code"] == "shutting_down"
    assert not store.followers
