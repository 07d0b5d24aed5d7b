"""Names of adapters in a real NATS: swapped by compare-and-set, a tenant's before the shared one, no other's read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec
import pytest

from shared.adapter_files import AdapterContent
from shared.adapter_names import AdapterNames, NamedAdapter
from shared.nats_connection import connect
from shared.streams import StreamLimits, ensure_streams
from shared.subjects import adapter_name_subject
from tests.servers import NatsServer

ONE, OTHER = AdapterContent("1" * 64, 8, 4), AdapterContent("2" * 64, 9, 2)


@pytest.fixture
async def names(nats_server: NatsServer) -> AsyncIterator[AdapterNames]:
    nats = await connect(nats_server.url, role="gateway", name="names")
    await ensure_streams(nats.jetstream(), StreamLimits())
    yield AdapterNames(nats.jetstream())
    await nats.close()


async def _meaning(names: AdapterNames, name: str, tenant: str | None) -> AdapterContent | None:
    found = await names.find(name, tenant)
    return None if found is None else found.content


async def test_tenants_name_goes_before_the_shared_one(names: AdapterNames) -> None:
    assert await names.put("own", None, "m", ONE)
    assert await names.put("own", "acme", "m", OTHER)
    assert [await _meaning(names, "own", tenant) for tenant in ("acme", "other", None)] == [OTHER, ONE, ONE]
    assert await names.put("own", "acme", "-", None)
    assert await _meaning(names, "own", "acme") == ONE


async def test_what_is_no_change_is_told(names: AdapterNames) -> None:
    assert [await names.put("same", None, "m", ONE) for _ in range(2)] == [True, False]
    assert await names.put("same", None, "n", ONE)
    assert [await names.put("same", None, "-", None) for _ in range(2)] == [True, False]
    assert not await names.put("never", None, "-", None)


async def test_name_that_only_workers_have_given_is_removed_by_a_record(names: AdapterNames) -> None:
    assert await names.find("module", None) is None
    assert [await names.put("module", None, "m", None, is_known=True) for _ in range(2)] == [True, False]
    found = await names.find("module", "acme")
    assert found.content is None


async def test_swaps_at_once_leave_one_meaning_for_all(names: AdapterNames) -> None:
    contents = [AdapterContent(f"{number:064x}", number) for number in range(8)]
    assert all(await asyncio.gather(*(names.put("busy", None, "m", content) for content in contents)))
    # Only the last record of a name is kept: whoever reads late gets what it means now.
    told = [named.content async for _, named in names.after(0) if named.name == "busy"]
    assert told == [await _meaning(names, "busy", None)]
    assert told[0] in contents


async def test_record_of_another_name_or_of_none_is_passed_over(names: AdapterNames, nats_server: NatsServer) -> None:
    nats = await connect(nats_server.url, role="gateway", name="stranger")
    foreign = msgspec.msgpack.encode(NamedAdapter("theirs", "acme", "m", ONE))
    for payload in (foreign, b"\xc1", msgspec.msgpack.encode({"name": "x" * 200})):
        await nats.jetstream().publish(adapter_name_subject("acme", "mine"), payload)
        assert await names.find("mine", "acme") is None
    await names.put("after-them", None, "m", ONE)
    assert [named.name async for _, named in names.after(0) if named.name in ("theirs", "after-them")] == ["after-them"]
    # Whoever writes next mends it.
    assert await names.put("mine", "acme", "m", OTHER)
    assert await _meaning(names, "mine", "acme") == OTHER
    await nats.close()
