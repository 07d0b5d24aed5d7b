"""The log of responses on a real NATS server: what is written is read, each tenant for itself, and within bounds."""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import AsyncIterator, Callable

import pytest

from gateway.api.large_bodies import LARGE_BYTES
from gateway.errors import ApiError
from gateway.responses import log as log_module
from gateway.responses.body import ItemBody, PartBody
from gateway.responses.draft import ResponseDraft
from gateway.responses.items import new_response_id
from gateway.responses.log import (
    PIECE_BYTES,
    PieceBudget,
    ResponseLog,
    ResponseLogError,
    ResponseRecord,
    decode_record,
)
from shared.direct_client import DirectClient
from shared.nats_connection import connect
from shared.streams import RESPONSES_STREAM, StreamLimits, ensure_streams
from shared.subjects import response_subject, responses_filter
from tests.servers import NatsServer


@pytest.fixture
async def nats(nats_url: str) -> AsyncIterator[DirectClient]:
    client = await connect(nats_url, role="gateway", name="log")
    await ensure_streams(client.jetstream(), StreamLimits())
    yield client
    await client.close()


@pytest.fixture
def tenant() -> str:
    return f"tenant {uuid.uuid4().hex}"


def record(tenant: str, num_bytes: int = 10) -> ResponseRecord:
    item = ItemBody(type="message", role="user", content=[PartBody(type="input_text", text="hi")])
    draft = ResponseDraft(id=new_response_id(), created_at=1, parameters=b'{"metadata":{}}', input=[item])
    return ResponseRecord(tenant, "m", draft, b"x" * num_bytes)


@pytest.mark.parametrize("num_bytes", [0, PIECE_BYTES - 1, PIECE_BYTES, 5 * PIECE_BYTES + 1])
async def test_record_of_any_size_is_read_back(nats: DirectClient, tenant: str, num_bytes: int) -> None:
    log, written = ResponseLog(nats), record(tenant, num_bytes)
    await log.put(written)
    assert await log.get(tenant, written.draft.id) == written
    await log.delete(tenant, written.draft.id)
    assert await log.get(tenant, written.draft.id) is None


async def test_large_record_is_decoded_beside_the_event_loop(
    nats: DirectClient, tenant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[int] = []

    def decode(payload: bytes) -> ResponseRecord:
        threads.append(threading.get_ident())
        return decode_record(payload)

    monkeypatch.setattr(log_module, "decode_record", decode)
    log, own = ResponseLog(nats), threading.get_ident()
    for num_bytes, is_beside in ((10, False), (LARGE_BYTES, True)):
        written = record(tenant, num_bytes)
        await log.put(written)
        assert await log.get(tenant, written.draft.id) == written
        assert (threads.pop() != own) == is_beside


async def test_tenant_reads_and_deletes_its_own_alone(nats: DirectClient, tenant: str) -> None:
    log, written = ResponseLog(nats), record(tenant)
    await log.put(written)
    for other in (f"{tenant}x", "*", ">", "a.b"):
        assert await log.get(other, written.draft.id) is None
        await log.delete(other, written.draft.id)
    # Not even what lies under its own name counts, if it says that it is another's.
    stored = await nats.jetstream().get_last_msg(RESPONSES_STREAM, response_subject(tenant, written.draft.id, 0))
    await nats.jetstream().publish(response_subject("thief", written.draft.id, 0), stored.data or b"")
    assert await log.get("thief", written.draft.id) is None
    assert await log.get(tenant, written.draft.id) == written


async def test_record_with_a_piece_missing_or_unreadable_is_gone(nats: DirectClient, tenant: str) -> None:
    log = ResponseLog(nats)
    torn, broken = record(tenant, 3 * PIECE_BYTES), record(tenant)
    for each in (torn, broken):
        await log.put(each)
    await nats.jetstream().purge_stream(RESPONSES_STREAM, subject=response_subject(tenant, torn.draft.id, 2))
    await nats.jetstream().publish(response_subject(tenant, broken.draft.id, 0), b"\xc1")
    assert [await log.get(tenant, each.draft.id) for each in (torn, broken)] == [None, None]


async def test_oldest_of_a_tenant_with_too_many_are_dropped(
    nats: DirectClient, tenant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_module, "TENANT_PIECES", 5)
    monkeypatch.setattr(log_module, "PIECES_BETWEEN_PURGES", 2)
    log, other = ResponseLog(nats), record(f"{tenant}x")
    await log.put(other)
    written = [record(tenant) for _ in range(12)]
    for each in written:
        await log.put(each)
    await log.close()
    found = [await log.get(tenant, each.draft.id) is not None for each in written]
    assert found == [False] * 7 + [True] * 5
    assert await log.get(other.tenant, other.draft.id) == other
    state = (await nats.jetstream().stream_info(RESPONSES_STREAM, subjects_filter=responses_filter(tenant))).state
    assert sum((state.subjects or {}).values()) == 5


def test_tenants_at_their_bounds_do_not_push_out_the_responses_of_others() -> None:
    # Between two purges a tenant may be above its bound, and NATS adds a header and the subject to each piece.
    most = (log_module.TENANT_PIECES + log_module.PIECES_BETWEEN_PURGES + log_module.MAX_PIECES) * (PIECE_BYTES + 512)
    assert 6 * most <= StreamLimits().responses_max_bytes


async def test_tenant_is_looked_at_once_for_so_many_pieces(nats: DirectClient, monkeypatch: pytest.MonkeyPatch) -> None:
    log, purged = ResponseLog(nats), []

    async def purge(tenant: str) -> None:
        purged.append(tenant)

    monkeypatch.setattr(log._bound, "_purge", purge)
    for num_pieces in (log_module.PIECES_BETWEEN_PURGES - 1, 1, 1, 1):
        log._bound.count("t", num_pieces)
    await log.close()
    assert purged == ["t"]


async def test_long_conversation_is_refused_before_it_is_read(nats: DirectClient, tenant: str) -> None:
    log, written = ResponseLog(nats), record(tenant, 3 * PIECE_BYTES)
    await log.put(written)
    budget = PieceBudget(6)
    assert await log.get(tenant, written.draft.id, budget) == written
    with pytest.raises(ApiError) as refusal:
        await log.get(tenant, written.draft.id, budget)
    assert refusal.value.code == "context_length_exceeded"


async def test_log_that_cannot_be_written_or_read_says_so(
    start_nats: Callable[..., NatsServer], tenant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_module, "_TIMEOUT_S", 0.3)
    server = start_nats()
    client = await connect(server.url, role="gateway", name="log")
    try:
        log, written = ResponseLog(client), record(tenant)
        with pytest.raises(ResponseLogError):
            await log.put(written)  # there is no stream
        await ensure_streams(client.jetstream(), StreamLimits())
        with pytest.raises(ResponseLogError, match="is larger than"):
            await log.put(record(tenant, log_module.MAX_PIECES * PIECE_BYTES + 1))
        await log.put(written)
        server.kill()
        with pytest.raises(ResponseLogError):
            await log.put(written)
        with pytest.raises(ApiError) as refusal:
            await log.get(tenant, written.draft.id)
        assert (refusal.value.status, refusal.value.retry_after_s) == (503, 2.0)
        server.restart()
        async with asyncio.timeout(20):
            while not client.is_connected:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        assert await log.get(tenant, written.draft.id) == written
    finally:
        await client.close()
