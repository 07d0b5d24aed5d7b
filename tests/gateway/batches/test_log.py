"""Records of batches in a real NATS: who finds which, and which of them are dropped."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from gateway.admission.stored_reads import ReadSize
from gateway.batches.endpoint import BatchRoutes
from gateway.batches.log import BatchLog
from gateway.batches.record import BatchRecord
from gateway.errors import ApiError
from shared.direct_client import DirectClient
from shared.streams import ensure_streams
from tests.gateway.batches.conftest import LIMITS, EchoWorker, Place


def record(tenant: str, number: int) -> BatchRecord:
    return BatchRecord(
        id=f"batch_{number:032x}", tenant=tenant, endpoint="/v1/chat/completions", input_file_id="file",
        completion_window="24h", created_at=0, expires_at=0, status="failed", store="elsewhere",
        metadata={"note": "x" * 1800},
    )  # fmt: skip


@pytest.fixture
async def log(place: Place, worker: EchoWorker) -> AsyncIterator[BatchLog]:
    """The log of a NATS that has its streams, since a worker is there."""
    nats = DirectClient()
    await nats.connect(place.nats_url)
    yield BatchLog(nats)
    await nats.close()


async def test_batch_is_found_by_its_tenant_and_id_among_those_that_run_or_else_those_that_have_ended(
    log: BatchLog, tenant: str
) -> None:
    batch = record(tenant, 1)
    revision = await log.put(batch, 0)
    assert await log.active(tenant, batch.id) == (batch, revision)
    assert await log.ended(tenant, batch.id) is None
    await log.end(batch, revision)
    assert await log.active(tenant, batch.id) is None
    ended = await log.ended(tenant, batch.id)
    assert ended is not None
    assert await log.get(tenant, batch.id) == ended.record == batch
    for other, batch_id in (("another", batch.id), (tenant, record(tenant, 2).id), (tenant, "batch_1")):
        assert await log.get(other, batch_id) is None


async def test_batches_that_are_created_at_once_are_counted_one_after_another(
    log: BatchLog, place: Place, tenant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.batches.endpoint.MAX_ACTIVE", 3)
    nats = DirectClient()
    await nats.connect(place.nats_url)
    await ensure_streams(nats.jetstream(), LIMITS, (tenant,))
    nothing: Any = None
    routes = BatchRoutes(nothing, nothing, log, nothing, nats, nothing)
    puts = [routes._put(record(tenant, number)) for number in range(10)]
    refused = [each for each in await asyncio.gather(*puts, return_exceptions=True) if isinstance(each, ApiError)]
    assert {error.code for error in refused} == {"too_many_batches"}
    assert len(await log.list_active(tenant)) == 10 - len(refused) == 3
    await nats.close()


async def test_large_records_of_one_tenant_leave_those_of_others(
    log: BatchLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.batches.log.MAX_ENDED_BYTES", 300_000)
    for tenant, count in (("small", 2), ("large", 200)):
        for number in range(count):
            await log.end(record(tenant, number), await log.put(record(tenant, number), 0))
    for _ in range(2):
        await log.bound("large")
        await log.bound("small")
        kept, _ = await log.page("large", 200, None, ReadSize())
        assert [each.id for each in kept] == [record("large", 199 - place).id for place in range(len(kept))]
        assert 140 < len(kept) <= 300_000 // 1800
    size = ReadSize()
    assert len((await log.page("small", 200, None, size))[0]) == 2
    assert (size.num_records, size.num_names) == (2, 2)
