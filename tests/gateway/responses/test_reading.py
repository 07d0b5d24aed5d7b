"""Reading what is stored: large texts are read in a thread, and what is read counts against the key's limit."""

from __future__ import annotations

import asyncio
import secrets
import threading
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from gateway.admission.auth import Principal
from gateway.admission.limits import READ_BYTES, RateLimiter
from gateway.api.large_bodies import LARGE_BYTES
from gateway.cache.redis_client import RedisCache
from gateway.errors import ApiError
from gateway.metrics import GatewayMetrics
from gateway.responses.background import BackgroundStream
from gateway.responses.draft import ResponseDraft
from gateway.responses.job import BackgroundJob, JobReader, JobWatch
from gateway.responses.job_queue import JobRef, JobState
from gateway.responses.log import PIECE_BYTES, PieceBudget, ResponseRecord
from gateway.responses.store import CONCURRENT_READERS, ResponseStore
from gateway.responses.stored import StoredResponses
from shared.messages import BatchResult

DRAFT = ResponseDraft(id="resp_" + 32 * "0", created_at=1, parameters=b"{}", input=[], is_background=True)
RECORD = ResponseRecord("t", "m", DRAFT, b"", BackgroundJob(stream_seq=1, deadline=0))
LONG = "word " * (LARGE_BYTES // 4)


class Stored:
    """One response, of a job with a text."""

    def __init__(self, text: str, num_pieces: int = 1) -> None:
        self._text = text
        self._num_pieces = num_pieces

    async def get(self, tenant: str, response_id: str, budget: PieceBudget | None = None) -> ResponseRecord:
        # The log is somewhere else: other requests go on meanwhile.
        await asyncio.sleep(0.01)
        if budget is not None:
            budget.take(self._num_pieces)
        return RECORD

    async def result(self, ref: JobRef) -> BatchResult:
        return BatchResult(id=DRAFT.id, model="m", tenant="t", text=self._text, finish="stop")

    async def watch(self, tenant: str, response_id: str) -> JobWatch:
        return JobWatch()

    async def unwatch(self, watch: JobWatch) -> None:
        pass


def store_of(stored: Stored, limiter: RateLimiter | None = None) -> ResponseStore:
    return ResponseStore(cast("Any", stored), cast("Any", stored), limiter=limiter)


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The threads in which texts of jobs were read."""
    threads: list[int] = []
    read = JobReader.read

    def spied(reader: JobReader, text: str, *, in_reasoning: bool) -> bool:
        threads.append(threading.get_ident())
        return read(reader, text, in_reasoning=in_reasoning)

    monkeypatch.setattr(JobReader, "read", spied)
    return threads


@pytest.mark.parametrize(("text", "is_beside"), [("short", False), (LONG, True)])
async def test_long_text_of_a_job_is_read_beside_the_event_loop(threads: list[int], text: str, is_beside: bool) -> None:
    store, own = store_of(Stored(text)), threading.get_ident()
    record = await store.get("t", DRAFT.id)
    assert record is not None
    assert msgspec.json.decode(record.response)["output"][0]["content"][0]["text"] == text
    async for _ in BackgroundStream(RECORD, store).events():
        pass
    assert [thread != own for thread in threads] == [is_beside, is_beside]


async def test_read_counts_once_for_each_64_kb_of_records_and_results() -> None:
    num_pieces = READ_BYTES // PIECE_BYTES
    principal = Principal("key", "t", reads_per_minute=5)
    store = store_of(Stored("x" * READ_BYTES, num_pieces), RateLimiter(None, GatewayMetrics()))
    for _ in range(3):
        async with store.reading(principal) as budget:
            await store.get("t", DRAFT.id, budget)
    # Two for each.
    with pytest.raises(ApiError, match="5 reads of stored responses per minute") as refusal:
        async with store.reading(principal):
            pytest.fail("this read is too many")
    assert refusal.value.status == 429
    async with store.reading(Principal("other", "t", reads_per_minute=5)), store.reading(Principal("own", "t")):
        pass


async def test_what_a_cancelled_response_has_counts_as_read() -> None:
    class Running(Stored):
        is_cancelled = False

        async def result(self, ref: JobRef) -> BatchResult | None:  # type: ignore[override]
            return await super().result(ref) if self.is_cancelled else None

        async def state(self, ref: JobRef) -> JobState:
            return JobState(True)

        async def cancel(self, ref: JobRef) -> None:
            self.is_cancelled = True

    store = store_of(Running("x" * READ_BYTES), RateLimiter(None, GatewayMetrics()))
    (handler,) = [route.handler for route in StoredResponses(store).routes() if route.path.endswith("/cancel")]
    request, principal = SimpleNamespace(path_params={"response_id": DRAFT.id}), Principal("k", "t", reads_per_minute=2)
    answer = await handler(cast("Any", request), principal)
    assert msgspec.json.decode(answer.body)["status"] == "completed"
    with pytest.raises(ApiError, match="2 reads of stored responses per minute"):
        await handler(cast("Any", request), principal)


@pytest.mark.parametrize("shared", [False, True])
async def test_many_large_reads_at_once_exceed_the_limit_by_no_more_than_are_read_at_once(
    redis_url: str, shared: bool
) -> None:
    metrics = GatewayMetrics()
    redis = RedisCache(redis_url, 5.0, metrics)
    await redis.start()
    # Of 4 MB each, so that one of them is more than the limit.
    store = store_of(Stored("", 64 * READ_BYTES // PIECE_BYTES), RateLimiter(redis if shared else None, metrics))
    principal = Principal(f"key_{secrets.token_hex(8)}", "t", reads_per_minute=55)

    async def read_status() -> int:
        try:
            async with store.reading(principal) as budget:
                await store.get("t", DRAFT.id, budget)
        except ApiError as refusal:
            return refusal.status
        return 200

    statuses = await asyncio.gather(*(read_status() for _ in range(55)))
    await redis.close()
    assert 1 <= statuses.count(200) <= CONCURRENT_READERS
    assert set(statuses) == {200, 429}
