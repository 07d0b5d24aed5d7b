"""Responses that are kept, and reads of them: a few of a tenant at once, and no others wait for large ones."""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from nats.js.errors import NotFoundError

from gateway.admission.auth import Principal
from gateway.admission.limits import READ_BYTES, RateLimiter
from gateway.admission.stored_reads import CONCURRENT_READERS, StoredReads
from gateway.api.large_bodies import LARGE_BYTES, LargeBodies
from gateway.cache.redis_client import RedisCache
from gateway.errors import ApiError
from gateway.metrics import GatewayMetrics
from gateway.responses.background import BackgroundStream
from gateway.responses.body import ItemBody
from gateway.responses.draft import ResponseDraft, response_fields
from gateway.responses.endpoint import CompactEndpoint, ResponsesEndpoint
from gateway.responses.items import new_response_id
from gateway.responses.job import JobReader, JobWatch
from gateway.responses.job_queue import JobRef, JobState
from gateway.responses.log import CONCURRENT_CALLS, PIECE_BYTES, PieceBudget, ResponseLog, ResponseRecord
from gateway.responses.reasoning_seal import ReasoningSeals
from gateway.responses.store import History, ResponseStore
from gateway.responses.stored import StoredResponses
from shared.messages import BatchResult
from tests.gateway.responses.test_background_stream import DRAFT, RECORD, result

RESPONSE_ID = new_response_id()
BODIES = {
    "previous": b'{"model":"m","input":"x","previous_response_id":"%s"}' % RESPONSE_ID.encode(),
    "reference": b'{"model":"m","input":[{"type":"item_reference","id":"msg_%s8000"}]}' % RESPONSE_ID[5:].encode(),
}


class SlowLog:
    """Has nothing, and says so when it is released."""

    def __init__(self) -> None:
        self.num_reading: dict[str, int] = {}
        self.released = asyncio.Event()

    async def get(self, tenant: str, response_id: str, budget: object = None) -> None:
        self.num_reading[tenant] = self.num_reading.get(tenant, 0) + 1
        await self.released.wait()


def store_of(log: SlowLog) -> ResponseStore:
    return ResponseStore(cast("Any", log), cast("Any", None), ReasoningSeals("s" * 32))


@pytest.mark.parametrize("endpoint", [ResponsesEndpoint, CompactEndpoint])
@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
async def test_conversations_of_one_tenant_are_read_a_few_at_a_time(
    endpoint: type[ResponsesEndpoint], body: bytes
) -> None:
    log = SlowLog()
    asked = endpoint(store_of(log), LargeBodies())
    greedy = [
        asyncio.ensure_future(asked.generation(body, Principal("key", "greedy"))) for _ in range(3 * CONCURRENT_READERS)
    ]
    other = asyncio.ensure_future(asked.generation(body, Principal("key", "other")))
    await asyncio.sleep(0.01)
    assert log.num_reading == {"greedy": CONCURRENT_READERS, "other": 1}
    # Who continues nothing does not wait for those who do.
    assert await asked.generation(b'{"model":"m","input":"x"}', Principal("key", "greedy"))
    log.released.set()
    refusals = await asyncio.gather(*greedy, other, return_exceptions=True)
    assert {type(refusal) for refusal in refusals} == {ApiError}
    assert log.num_reading["greedy"] == 3 * CONCURRENT_READERS


async def test_responses_of_one_tenant_are_retrieved_a_few_at_a_time() -> None:
    log = SlowLog()
    (retrieve, *_) = StoredResponses(store_of(log)).routes()
    request = SimpleNamespace(query_params={}, path_params={"response_id": RESPONSE_ID})
    asked = [
        asyncio.ensure_future(retrieve.handler(cast("Any", request), Principal("key", "greedy")))
        for _ in range(3 * CONCURRENT_READERS)
    ]
    await asyncio.sleep(0.01)
    assert log.num_reading == {"greedy": CONCURRENT_READERS}
    log.released.set()
    refusals = await asyncio.gather(*asked, return_exceptions=True)
    assert [cast("ApiError", refusal).status for refusal in refusals] == [404] * len(asked)


class SlowStream:
    """JetStream that answers when it is released."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.released = asyncio.Event()

    def jetstream(self, timeout: float) -> SlowStream:
        return self

    async def get_last_msg(self, stream: str, subject: str) -> None:
        await self.purge_stream(stream, subject)
        raise NotFoundError

    async def purge_stream(self, stream: str, subject: str) -> None:
        self.calls.append(subject)
        await self.released.wait()


@pytest.mark.parametrize("call", [ResponseLog.get, ResponseLog.delete])
async def test_calls_of_one_tenant_to_the_log_are_a_few_at_a_time(
    call: Callable[[ResponseLog, str, str], Coroutine[Any, Any, object]],
) -> None:
    stream = SlowStream()
    log = ResponseLog(cast("Any", stream))
    calls = [asyncio.ensure_future(call(log, "greedy", new_response_id())) for _ in range(3 * CONCURRENT_CALLS)]
    calls.append(asyncio.ensure_future(call(log, "other", RESPONSE_ID)))
    await asyncio.sleep(0.01)
    assert len(stream.calls) == CONCURRENT_CALLS + 1
    stream.released.set()
    await asyncio.gather(*calls)
    assert len(stream.calls) == 3 * CONCURRENT_CALLS + 1


class RecordsInMemory(ResponseStore):
    """Responses that have ended, without NATS."""

    def __init__(self, records: list[ResponseRecord]) -> None:
        super().__init__(cast("Any", None), cast("Any", None))
        self.records = {record.draft.id: record for record in records}

    async def get(self, tenant: str, response_id: str, budget: PieceBudget | None = None) -> ResponseRecord | None:
        return self.records.get(response_id)


def chain(*models: str) -> list[ResponseRecord]:
    """Responses of which each continues the one before it, each of its own model."""
    records: list[ResponseRecord] = []
    for model in models:
        ancestors = tuple(record.draft.id for record in records)
        item = ItemBody(type="message", role="user", content=f"to {model}")
        draft = ResponseDraft(id=new_response_id(), created_at=1, parameters=b"{}", input=[item], ancestors=ancestors)
        response = msgspec.json.encode(response_fields(draft, "completed"))
        records.append(ResponseRecord("acme", model, draft, response))
    return records


async def test_every_response_of_a_conversation_must_be_of_a_model_that_the_key_may_use() -> None:
    records = chain("secret", "open", "open")
    history = History(RecordsInMemory(records))
    last = records[-1].draft.id
    items, ancestors = await history.before(Principal("key", "acme"), last, PieceBudget())
    assert [item.content for item in items] == ["to secret", "to open", "to open"]
    assert ancestors == tuple(record.draft.id for record in records)
    with pytest.raises(ApiError) as refusal:
        await history.before(Principal("key", "acme", frozenset({"open"})), last, PieceBudget())
    assert (refusal.value.status, refusal.value.code) == (400, "previous_response_not_found")
    assert records[0].draft.id in refusal.value.message


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
        return result(self._text)

    async def watch(self, tenant: str, response_id: str) -> JobWatch:
        return JobWatch()

    async def unwatch(self, watch: JobWatch) -> None:
        pass


def reading_store(stored: Stored, limiter: RateLimiter | None = None) -> ResponseStore:
    return ResponseStore(cast("Any", stored), cast("Any", stored), reads=StoredReads(limiter))


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


@pytest.mark.parametrize(("text", "is_beside"), [("short", False), (5000 * "a", True), (LONG, True)])
async def test_long_text_of_a_job_is_read_beside_the_event_loop(threads: list[int], text: str, is_beside: bool) -> None:
    store, own = reading_store(Stored(text)), threading.get_ident()
    record = await store.get("t", DRAFT.id)
    assert record is not None
    assert msgspec.json.decode(record.response)["output"][0]["content"][0]["text"] == text
    async for _ in BackgroundStream(RECORD, store).events():
        pass
    assert [thread != own for thread in threads] == [is_beside, is_beside]


async def test_read_counts_once_for_each_64_kb_of_records_and_results() -> None:
    num_pieces = READ_BYTES // PIECE_BYTES
    principal = Principal("key", "t", reads_per_minute=5)
    store = reading_store(Stored("x" * READ_BYTES, num_pieces), RateLimiter(None, GatewayMetrics()))
    for _ in range(3):
        async with store.reading(principal) as budget:
            await store.get("t", DRAFT.id, budget)
    # Two for each.
    with pytest.raises(ApiError, match="5 reads of stored data per minute") as refusal:
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

    store = reading_store(Running("x" * READ_BYTES), RateLimiter(None, GatewayMetrics()))
    (handler,) = [route.handler for route in StoredResponses(store).routes() if route.path.endswith("/cancel")]
    request, principal = SimpleNamespace(path_params={"response_id": DRAFT.id}), Principal("k", "t", reads_per_minute=2)
    answer = await handler(cast("Any", request), principal)
    assert msgspec.json.decode(answer.body)["status"] == "completed"
    with pytest.raises(ApiError, match="2 reads of stored data per minute"):
        await handler(cast("Any", request), principal)


@pytest.mark.parametrize("shared", [False, True])
async def test_many_large_reads_at_once_exceed_the_limit_by_no_more_than_are_read_at_once(
    redis_url: str, shared: bool
) -> None:
    metrics = GatewayMetrics()
    redis = RedisCache(redis_url, 5.0, metrics)
    await redis.start()
    # Of 4 MB each, so that one of them is more than the limit.
    store = reading_store(Stored("", 64 * READ_BYTES // PIECE_BYTES), RateLimiter(redis if shared else None, metrics))
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
