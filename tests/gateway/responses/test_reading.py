"""Reading what is stored: large texts are read in a thread, and what is read counts against the key's limit."""

from __future__ import annotations

import threading
from typing import Any, cast

import msgspec
import pytest

from gateway.admission.auth import Principal
from gateway.admission.limits import READ_BYTES, RateLimiter
from gateway.api.large_bodies import LARGE_BYTES
from gateway.errors import ApiError
from gateway.metrics import GatewayMetrics
from gateway.responses.draft import ResponseDraft
from gateway.responses.follower import Follower
from gateway.responses.job import BackgroundJob, JobReader
from gateway.responses.job_queue import JobRef
from gateway.responses.job_watch import JobWatch
from gateway.responses.log import PIECE_BYTES, PieceBudget
from gateway.responses.record import ResponseRecord
from gateway.responses.store import ResponseStore
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
    async for _ in Follower(RECORD, store).events():
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
