"""How a background response is followed, with states of its job that the test sets."""

from __future__ import annotations

import asyncio
import json
from typing import Any, cast

import msgspec
import pytest
from nats.aio.msg import Msg

from gateway.errors import ApiError
from gateway.responses import background as follower_module
from gateway.responses import store as store_module
from gateway.responses.background import BackgroundStream
from gateway.responses.draft import ResponseDraft
from gateway.responses.job import BackgroundJob, JobWatch
from gateway.responses.job_queue import JobQueue, JobRef, JobState
from gateway.responses.log import ResponseRecord
from gateway.responses.store import ResponseStore
from shared.batch_progress import BatchProgress
from shared.messages import BatchResult

DRAFT = ResponseDraft(id="resp_" + 32 * "0", created_at=1, parameters=b"{}", input=[], is_background=True)
RECORD = ResponseRecord("t", "m", DRAFT, b"", BackgroundJob(stream_seq=1, deadline=0))


class Jobs:
    """What NATS would say of the job: one state after the other, the last for ever."""

    def __init__(self, *states: JobState | BatchResult | ApiError) -> None:
        self._states = list(states)

    async def result(self, ref: JobRef) -> BatchResult | None:
        state = self._states[0]
        if isinstance(state, ApiError):
            self._forward()
            raise state
        return self._states[0] if isinstance(self._states[0], BatchResult) else None

    async def state(self, ref: JobRef) -> JobState:
        state = self._forward()
        assert isinstance(state, JobState)
        return state

    async def watch(self, tenant: str, response_id: str) -> JobWatch:
        return JobWatch()

    async def unwatch(self, watch: JobWatch) -> None:
        await watch.close()

    def _forward(self) -> JobState | BatchResult | ApiError:
        return self._states.pop(0) if len(self._states) > 1 else self._states[0]


def result(text: str, **fields: Any) -> BatchResult:
    return BatchResult(**{"id": DRAFT.id, "model": "m", "tenant": "t", "text": text, "finish": "stop"} | fields)


def following(
    *states: JobState | BatchResult | ApiError, starting_after: int = -1
) -> tuple[BackgroundStream, ResponseStore]:
    store = ResponseStore(cast("Any", None), cast("JobQueue", Jobs(*states)))
    return BackgroundStream(RECORD, store, starting_after), store


async def events_of(follower: BackgroundStream) -> list[dict[str, Any]]:
    told = b"".join([piece async for piece in follower.events()]).decode()
    data = [line.removeprefix("data: ") for line in told.split("\n") if line.startswith(("data: ", ":"))]
    return [{"type": "comment"} if line.startswith(":") else json.loads(line) for line in data]


@pytest.fixture(autouse=True)
def _no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower_module, "FIRST_POLL_S", 0.001)
    monkeypatch.setattr(follower_module, "LAST_POLL_S", 0.001)


async def test_text_is_told_as_it_grows_and_once() -> None:
    text = "abc" * 50
    follower, _ = following(JobState(False), JobState(True), JobState(True, text[:40]), JobState(True, text[:40]),
                            JobState(True, text[:130]), result(text))  # fmt: skip
    events = await events_of(follower)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta") == text
    assert events[-1]["response"]["status"] == "completed"


async def test_who_has_seen_the_last_event_gets_the_end_of_the_stream_alone() -> None:
    events = await events_of(following(result("abc"))[0])
    last = events[-1]["sequence_number"]
    assert await events_of(following(JobState(True, "a"), result("abc"), starting_after=last)[0]) == []
    assert await events_of(following(result("abc"), starting_after=last - 1)[0]) == events[-1:]
    # A number that this text does not reach is of one that was lost: its client has not seen this end.
    assert await events_of(following(result("abc"), starting_after=last + 1)[0]) == events[-1:]


async def test_text_that_was_computed_anew_ends_the_stream_with_an_error() -> None:
    follower, _ = following(JobState(True, "a" * 40), result("b" * 40))
    last = (await events_of(follower))[-1]
    assert (last["type"], last["code"], last["error"]["code"]) == ("error", "response_restarted", "response_restarted")


async def test_job_that_expired_without_its_text_keeps_what_was_told() -> None:
    follower, _ = following(JobState(True, "a" * 40), result("", finish="expired"))
    last = (await events_of(follower))[-1]
    assert (last["type"], last["response"]["error"]["code"]) == ("response.failed", "server_error")
    assert last["response"]["usage"] is None
    assert last["response"]["output"][0]["content"][0]["text"] == "a" * 40


def recorded(text: str, stream_seq: int = 1) -> Msg:
    record = msgspec.msgpack.encode(BatchProgress(b"", stream_seq, "", 0, (), text))
    return Msg(cast("Any", None), "hr.progress.t.r", "", record)


async def test_end_that_is_heard_is_asked_for_whatever_was_heard_before() -> None:
    watch = JobWatch()
    watch._receive_record(recorded("x"))
    watch._receive_end(recorded("x"))
    assert watch.changed.done()
    assert watch.take(1) is None


async def test_what_is_heard_is_told_without_asking(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FIRST_POLL_S", "LAST_POLL_S"):
        monkeypatch.setattr(follower_module, name, 60.0)
    watch, asked = JobWatch(), 0

    class AskedJobs(Jobs):
        async def result(self, ref: JobRef) -> BatchResult | None:
            nonlocal asked
            asked += 1
            return await super().result(ref)

    jobs = AskedJobs(JobState(False), result("x" * 40))
    follower = BackgroundStream(RECORD, ResponseStore(cast("Any", None), cast("JobQueue", jobs)), watch=watch)
    told: list[bytes] = []

    async def follow() -> None:
        async for piece in follower.events():
            told.append(piece)  # noqa: PERF401 - read while it grows

    async def until(word: bytes) -> None:
        async with asyncio.timeout(30):
            while word not in b"".join(told):  # noqa: ASYNC110
                await asyncio.sleep(0)

    following = asyncio.create_task(follow())
    await until(b"response.queued")
    watch._receive_record(recorded("x" * 33))
    await until(b"x" * 16)
    assert asked == 1
    watch._receive_end(recorded(""))
    await until(b"response.completed")
    await following
    assert asked == 2


async def test_record_of_another_message_under_the_same_id_is_not_told() -> None:
    watch = JobWatch()
    watch._receive_record(recorded("another's " * 4, stream_seq=2))
    jobs = Jobs(JobState(False), result("x" * 40))
    follower = BackgroundStream(RECORD, ResponseStore(cast("Any", None), cast("JobQueue", jobs)), watch=watch)
    events = await events_of(follower)
    assert "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta") == "x" * 40


async def test_silence_is_kept_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower_module, "_KEEP_ALIVE_S", 0.002)
    follower, _ = following(*[JobState(True)] * 8, result("x"))
    kinds = [event["type"] for event in await events_of(follower)]
    assert kinds.count("comment") >= 2
    assert kinds[-1] == "response.completed"


async def test_comments_behind_ids_end_no_event(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower_module, "_KEEP_ALIVE_S", 0.002)
    store = ResponseStore(cast("Any", None), cast("JobQueue", Jobs(*[JobState(True)] * 8, result("x"))))
    told = b"".join([piece async for piece in BackgroundStream(RECORD, store, 1, has_ids=True).events()])
    assert told.startswith(b": keep-alive\nid: 2\n") or told.startswith(b"id: 2\n")
    assert b": keep-alive\n" in told
    assert b": keep-alive\n\n" not in told


AWAY = ApiError(503, "away", code="queue_unavailable", retry_after_s=2.0)


async def test_queue_that_is_away_for_a_moment_is_not_noticed() -> None:
    follower, _ = following(JobState(True, "a" * 40), AWAY, AWAY, JobState(True, "a" * 80), result("a" * 90))
    events = await events_of(follower)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == "a" * 90


async def test_queue_that_stays_away_ends_the_stream_after_the_last_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower_module, "OUTAGE_S", 0.01)
    for starting_after, numbers in ((-1, [0, 1, 1]), (7, [7])):
        follower, _ = following(AWAY, starting_after=starting_after)
        events = await events_of(follower)
        assert ([event["sequence_number"] for event in events], events[-1]["code"]) == (numbers, "queue_unavailable")


async def test_each_absence_of_the_queue_has_a_time_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower_module, "OUTAGE_S", 0.02)

    async def wait(self: BackgroundStream, watch: JobWatch, wait_s: float) -> None:
        await asyncio.sleep(0.03)

    monkeypatch.setattr(BackgroundStream, "_wait", wait)
    follower, _ = following(AWAY, JobState(True, "a" * 40), AWAY, result("a" * 40))
    assert (await events_of(follower))[-1]["type"] == "response.completed"


async def test_text_that_is_shorter_for_a_while_is_waited_for() -> None:
    states = [JobState(True, "a" * 70), JobState(True, ""), JobState(True, "a" * 33), JobState(True, "a" * 70)]
    follower, _ = following(*states, result("a" * 90))
    events = await events_of(follower)
    assert "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta") == "a" * 90


async def test_news_are_followed_by_quick_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(follower_module, "LAST_POLL_S", 0.004)

    async def wait(self: BackgroundStream, watch: JobWatch, wait_s: float) -> None:
        waits.append(round(wait_s * 1000, 2))

    monkeypatch.setattr(BackgroundStream, "_wait", wait)
    idle = [JobState(True)] * 6
    follower, _ = following(*idle, JobState(True, "a" * 40), *[JobState(True, "a" * 40)] * 2, result("a" * 40))
    await events_of(follower)
    assert waits == [1.0, 1.3, 1.69, 2.2, 2.86, 3.71, 1.0, 1.3, 1.69]


async def test_a_shutdown_ends_the_stream_with_an_error() -> None:
    follower, store = following(JobState(True, "a" * 40))
    store.add_follower(follower)
    telling = asyncio.create_task(events_of(follower))
    store.cut_followers(ApiError(503, "down", code="shutting_down", retry_after_s=1.0))
    assert (await telling)[-1]["code"] == "shutting_down"


async def test_tenant_with_many_streams_gets_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "MAX_FOLLOWERS", 2)
    first, store = following(JobState(True, "a" * 40))
    second = BackgroundStream(RECORD, store)
    for follower in (first, second):
        store.add_follower(follower)
    with pytest.raises(ApiError, match="follows 2 responses") as refusal:
        store.add_follower(BackgroundStream(RECORD, store))
    assert (refusal.value.status, refusal.value.code) == (429, "too_many_streams")
    store.add_follower(BackgroundStream(msgspec.structs.replace(RECORD, tenant="other"), store))
    store.remove_follower(first)
    store.add_follower(BackgroundStream(RECORD, store))


async def test_tenant_with_many_streams_is_told_when_one_of_them_is_expected_to_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    monkeypatch.setattr(store_module, "MAX_FOLLOWERS", 2)
    monkeypatch.setattr(store_module.time, "monotonic", lambda: now)

    def refusal() -> ApiError:
        with pytest.raises(ApiError) as refused:
            store.add_follower(BackgroundStream(RECORD, store))
        return refused.value

    first, store = following(JobState(True))
    store.add_follower(first)
    now = 4.0
    store.add_follower(BackgroundStream(RECORD, store))
    # None has ended: the oldest is thought to be in its middle, so one of two ends in half of its whole time.
    assert refusal().retry_after_s == 4.0
    now = 20.0
    store.remove_follower(first)
    store.add_follower(BackgroundStream(RECORD, store))
    now = 22.0
    # They last 20 s, so one of two ends every 10 s.
    assert (refusal().retry_after_s, "in 10 s" in refusal().message) == (10.0, True)
