"""Orders about adapters: bodies beyond limits are refused; contents without a name are deleted after their grace."""

from __future__ import annotations

import asyncio
import json
import os
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from gateway.api import adapter_orders
from gateway.api.adapter_orders import AdapterOrders, LoadBody, UnloadBody, sweep
from gateway.api.schemas.decoding import decode_typed
from gateway.errors import ApiError
from shared import adapter_store
from shared.adapter_calls import AdapterBeat, AdapterReply, NamesRead
from shared.adapter_files import MAX_ADAPTER_BYTES, MAX_TOLD_RANK, AdapterContent
from shared.adapter_names import NamedAdapter
from shared.adapter_store import AdapterStore, AdapterStoreError
from shared.direct_client import DirectClient
from shared.features import ADAPTER_STORE, FEATURES
from shared.messages import encode
from shared.objects.directory import DirectoryStore
from shared.task_supervisor import TaskSupervisor
from tests.gateway.fleet.test_fleet import Watched
from tests.shared.stored_adapters import write_stored

DAY_S = 86400.0
DIGEST = "a" * 64


class HeldStore(DirectoryStore):
    """Deletes contents once it may."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.is_deleting, self.may_delete = asyncio.Event(), asyncio.Event()
        self.may_delete.set()

    async def delete_folder(self, folder: str) -> None:
        self.is_deleting.set()
        await self.may_delete.wait()
        await super().delete_folder(folder)


class Bench:
    """A gateway that has read what names mean, and a store of adapters."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.objects = HeldStore(directory / "store")
        self.store = AdapterStore(self.objects)
        self.watched = Watched()
        self.fleet = self.watched.fleet
        self.fleet.named_adapters.read = NamesRead(1.0, 1)

    async def put(self, text: str) -> AdapterContent:
        return await self.store.put(self.adapter(text))

    def adapter(self, text: str) -> Path:
        return write_stored(self.directory / text, text.encode())

    def name(self, name: str, content: AdapterContent | None, tenant: str | None = None) -> None:
        self.fleet.named_adapters.note(NamedAdapter(name, tenant, "m", content))

    async def read_names(self) -> None:
        """They are read already."""

    async def sweep(self, *, after_days: float = 0.0) -> None:
        """Sweep when marks are older by some days."""
        for mark in (self.directory / "store/headrace/unnamed-adapters").glob("*"):
            modified = mark.stat().st_mtime - after_days * DAY_S
            os.utime(mark, (modified, modified))
        await sweep(self.store, self.fleet, self.read_names)

    async def has(self, content: AdapterContent) -> bool:
        return await self.store.num_bytes(content.digest) == content.num_bytes


@pytest.fixture
async def bench(tmp_path: Path) -> Any:
    bench = Bench(tmp_path)
    yield bench
    await bench.store.close()


async def test_content_without_a_name_is_deleted_after_its_grace(bench: Bench) -> None:
    await bench.sweep()  # nothing was ever stored
    shared, own, module, nameless = [await bench.put(text) for text in ("shared", "own", "module", "nameless")]
    bench.name("a", shared)
    bench.name("a", own, "acme")
    bench.watched.hear(worker="w", adapters=(AdapterBeat("b", module.digest),))
    for days in (0, 29):
        await bench.sweep(after_days=days)
        assert await bench.has(nameless)
    await bench.sweep(after_days=2)
    assert [await bench.has(each) for each in (shared, own, module, nameless)] == [True, True, True, False]
    # Stored again, it stays for as long again.
    await bench.put("nameless")
    for days in (31, 0, 29):
        await bench.sweep(after_days=days)
    assert await bench.has(nameless)


async def test_name_that_is_removed_leaves_its_content_to_requests_for_as_long_again(bench: Bench) -> None:
    content = await bench.put("content")
    await bench.sweep()
    bench.name("a", content, "acme")
    await bench.sweep(after_days=31)
    bench.name("a", None, "acme")
    for days in (31, 29):
        await bench.sweep(after_days=days)
        assert await bench.has(content)
    await bench.sweep(after_days=2)
    assert not await bench.has(content)


async def test_one_sweep_does_so_much_and_the_next_goes_on(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_store, "_MAX_SWEPT", 2)
    contents = [await bench.put(f"content-{number}") for number in range(3)]
    left = []
    for days in (0, 0, 31, 31):
        await bench.sweep(after_days=days)
        left.append(sum([await bench.has(each) for each in contents]))
    assert left == [3, 3, 1, 0]


async def test_nothing_is_deleted_while_names_cannot_be_read(bench: Bench) -> None:
    content = await bench.put("content")
    await bench.sweep()
    bench.fleet.named_adapters.read = None
    with pytest.raises(AdapterStoreError, match="no names of adapters"):
        await bench.sweep(after_days=31)
    assert await bench.has(content)


async def test_what_is_stored_again_while_names_are_read_stays(bench: Bench) -> None:
    content = await bench.put("content")
    await bench.sweep()

    async def read_names() -> None:
        await bench.put("content")

    bench.read_names = read_names  # type: ignore[method-assign]
    await bench.sweep(after_days=31)
    assert await bench.has(content)


class Names:
    """Names that are written when the deletion, which had begun before, is done."""

    def __init__(self, bench: Bench, sweeping: asyncio.Task[None]) -> None:
        self.bench = bench
        self.sweeping = sweeping

    async def put(
        self, name: str, tenant: str | None, base: str, content: AdapterContent | None, *, is_known: bool
    ) -> bool:
        self.bench.objects.may_delete.set()
        await self.sweeping
        assert content is not None
        assert not await self.bench.has(content)
        self.bench.name(name, content, tenant)
        return True


class Queue:
    def jetstream(self) -> None:
        """There is none."""


async def test_add_that_races_the_deletion_of_its_content_has_it(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    content = await bench.put("content")
    await bench.sweep()
    bench.objects.may_delete.clear()
    sweeping = asyncio.create_task(bench.sweep(after_days=31))
    await bench.objects.is_deleting.wait()

    async def checked(*order: object) -> Any:
        return type("Reply", (), {"data": encode(AdapterReply())})

    monkeypatch.setattr(adapter_orders, "call_process", checked)
    bench.watched.hear(worker="w", features=(*FEATURES, ADAPTER_STORE))
    bench.fleet.named_adapters.read = None  # no other gateway is waited for
    orders = AdapterOrders(Queue(), bench.fleet, bench.store, bench.read_names)  # type: ignore[arg-type]
    orders._names = Names(bench, sweeping)  # type: ignore[assignment]
    path = str(bench.adapter("content"))
    await orders.load(msgspec.json.encode({"lora_name": "a", "lora_path": path, "tenant": "acme"}))
    bench.fleet.named_adapters.read = NamesRead(1.0, 1)
    for days in (0, 31):
        await bench.sweep(after_days=days)
    read = bench.directory / "read"
    read.mkdir()
    assert await bench.store.fetch(content.digest, read) == content.num_bytes


class ClosedStore(DirectoryStore):
    """Knows which tasks its closing finds."""

    tasks_at_close: set[str] | None = None

    async def close(self) -> None:
        self.tasks_at_close = {task.get_name() for task in asyncio.all_tasks()}
        await super().close()


async def test_store_is_closed_at_the_end_once_nothing_sweeps_it(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, nats_url: str
) -> None:
    store, nats, tasks = ClosedStore(bench.directory), DirectClient(), TaskSupervisor()
    monkeypatch.setattr(adapter_orders, "store_of", lambda place, variable: store)
    await nats.connect(nats_url)
    dispatcher = SimpleNamespace(fleet=bench.fleet, send_heartbeat=bench.read_names)
    async with AsyncExitStack() as stack:
        await adapter_orders.adapter_orders(stack, str(bench.directory), nats, cast("Any", dispatcher), tasks)
        assert "sweep of adapters" in {task.get_name() for task in asyncio.all_tasks()}
        assert store.tasks_at_close is None
    assert store.tasks_at_close is not None
    assert "sweep of adapters" not in store.tasks_at_close
    await nats.close()


@pytest.mark.parametrize(
    ("struct", "fields", "param", "allowed"),
    [
        (LoadBody, {"lora_content": [DIGEST, 8, 10**30]}, "lora_content.[2]", f"<= {MAX_TOLD_RANK}"),
        (LoadBody, {"lora_content": [DIGEST, 8, -1]}, "lora_content.[2]", ">= 0"),
        (LoadBody, {"lora_content": [DIGEST, 10**30]}, "lora_content.[1]", f"<= {MAX_ADAPTER_BYTES}"),
        (LoadBody, {"lora_content": ["A" * 64, 8]}, "lora_content.[0]", "matching regex"),
        (LoadBody, {"lora_path": "a\0b"}, "lora_path", "matching regex"),
        (LoadBody, {"lora_path": "a" * 4097}, "lora_path", "length <= 4096"),
        (LoadBody, {"base_model_name": "m" * 129}, "base_model_name", "length <= 128"),
        (UnloadBody, {"base_model_name": "m" * 129}, "base_model_name", "length <= 128"),
        (UnloadBody, {"lora_int_id": 10**30}, "lora_int_id", f"<= {2**63 - 1}"),
    ],
)
def test_field_beyond_its_limits_is_a_400_that_names_both(
    struct: type[msgspec.Struct], fields: dict[str, Any], param: str, allowed: str
) -> None:
    with pytest.raises(ApiError) as raised:
        decode_typed(struct, json.dumps({"lora_name": "a", **fields}).encode())
    assert (raised.value.status, raised.value.param) == (400, param)
    assert allowed in raised.value.message
