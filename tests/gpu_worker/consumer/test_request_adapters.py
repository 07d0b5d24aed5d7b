"""Adapters of requests: loaded once, refused with a sentence, unavailable while the store is, and never a hang."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from nats.errors import TimeoutError as NatsTimeoutError

from gpu_worker.adapters.reader import PackedAdapter, check_adapter, read_packed
from gpu_worker.adapters.slots import AdapterSlots
from gpu_worker.consumer import request_adapters
from gpu_worker.consumer.held_request import HeldRequest, HeldRequests
from gpu_worker.consumer.request_adapters import RequestAdapters
from gpu_worker.layers.adapters import AdapterTargets
from kernels.low_rank.form import PAGE_BYTES
from shared import adapter_store
from shared.adapter_files import AdapterContent
from shared.adapter_names import NamedAdapter
from shared.adapter_store import AdapterStore, AdapterStoreError
from shared.errors import BadRequestError
from shared.messages import Request
from shared.objects.directory import DirectoryStore
from shared.sampling import Sampling
from tests.gpu_worker.adapters.peft_files import write_adapter
from tests.waiting import until

_MODULE = "model.layers.0.mlp.down_proj"


class Engine:
    def call(self, command: Callable[[], object]) -> None:
        command()


class Names:
    """One tenant's name `mine` means what is given."""

    content: AdapterContent | None = None

    async def find(self, name: str, tenant: str) -> NamedAdapter | None:
        if (name, tenant) != ("mine", "acme"):
            return None
        return NamedAdapter(name, tenant, "m", self.content)


class Bench:
    """Adapters of one worker with a slot or more, and a store of their contents."""

    def __init__(self, directory: Path, num_slots: int = 1) -> None:
        self.directory = directory
        self.targets = AdapterTargets(num_slots, torch.device("cpu"), torch.float32)
        self.targets.add((_MODULE,), (8,), 12)
        self.store = AdapterStore(DirectoryStore(directory / "store"))
        self.names, self.held = Names(), HeldRequests()
        self.slots = AdapterSlots(num_slots, num_slots * PAGE_BYTES)
        self.read: list[PackedAdapter] = []
        self.forgotten: list[PackedAdapter] = []
        self.placed: dict[int, PackedAdapter | None] = {}

        def read(path: Path) -> PackedAdapter:
            self.read.append(read_packed(path, self.targets))
            return self.read[-1]

        def place(slot: int, adapter: PackedAdapter | None) -> None:
            self.targets.place(slot, None if adapter is None else adapter.packed)
            self.placed[slot] = adapter

        parts: Any = (self.slots, read, place, self.store, self.names, Engine(), self.held)
        check = partial(check_adapter, targets=self.targets)
        self.adapters = RequestAdapters(*parts, self.forgotten.append, check)

    async def put(self, seed: int, **config: Any) -> str:
        adapter = write_adapter(self.directory / f"adapter{seed}", {_MODULE: (8, 12)}, seed=seed, **config)
        return (await self.store.put(adapter)).digest

    def hold(self, adapter: str, **fields: Any) -> HeldRequest:
        key = f"r{len(self.held)}-{adapter[:4]}"
        sent = {"id": key, "model": "m", "reply": None, "text": "a", "tenant": "acme", **fields}
        request = Request(sampling=Sampling(max_tokens=1), adapter=adapter, **sent)
        message: Any = None
        held = HeldRequest(key, request, message)
        self.held.add(held)
        return held

    async def prepare(self, held: HeldRequest) -> None:
        async with asyncio.timeout(20):
            await self.adapters.prepare(held)


async def test_name_is_its_tenants_alone(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.names.content = AdapterContent(await bench.put(1), 8)
    held = bench.hold("mine")
    await bench.prepare(held)
    assert (held.request.adapter, bench.slots.residents) == (held.adapter, (bench.names.content.digest,))
    with pytest.raises(BadRequestError, match="has no adapter 'mine'"):
        await bench.prepare(bench.hold("mine", tenant="other"))
    await bench.adapters.close()


async def test_workers_own_name_counts_where_no_operator_has_said_anything(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    own = bench.adapters.named["module"] = bench.adapters.named["mine"] = await bench.put(1)
    held = bench.hold("module")
    await bench.prepare(held)
    assert held.adapter == own
    # The operator has removed this one.
    with pytest.raises(BadRequestError, match="has no adapter 'mine'"):
        await bench.prepare(bench.hold("mine"))
    await bench.adapters.close()


async def test_refused_adapter_is_the_requests_fault_and_takes_no_slot(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench(tmp_path)
    digest = await bench.put(1, use_dora=True)
    for _ in range(2):
        with pytest.raises(BadRequestError, match="DoRA"):
            await bench.prepare(bench.hold(digest))
    await bench.prepare(bench.hold(await bench.put(2)))
    await bench.adapters.close()
    (told,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert told.getMessage().startswith(
        f"adapter {digest[:12]} is refused: adapter_config.json has use_dora 'True': DoRA"
    )
    assert told.exc_info is None


async def test_large_adapter_is_refused_by_its_header_and_each_time_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its digest was not checked: the store may have been damaged."""
    bench = Bench(tmp_path)
    digest = await bench.put(1, use_dora=True)
    monkeypatch.setattr(adapter_store, "CHECKED_FIRST_BYTES", 0)
    for _ in range(2):
        with pytest.raises(BadRequestError, match="DoRA"):
            await bench.prepare(bench.hold(digest))
    assert not bench.read
    assert caplog.text.count("is refused: adapter_config.json has use_dora") == 1
    (config,) = (tmp_path / "store").rglob("adapter_config.json")
    config.write_text(config.read_text().replace("true", "null"))
    with pytest.raises(AdapterStoreError, match="is something else"):
        await bench.prepare(bench.hold(digest))
    bench.slots.max_bytes = 99
    with pytest.raises(BadRequestError, match=r"bytes; 99 have room \(HEADRACE_MAX_LORA_BYTES\)"):
        await bench.prepare(bench.hold(digest))
    await bench.adapters.close()
    assert not [record for record in caplog.records if record.exc_info]


async def test_adapter_that_the_store_lacks_is_unavailable_until_it_has_it(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    digest = await Bench(tmp_path / "other").put(1)
    held = bench.hold(digest)
    with pytest.raises(AdapterStoreError, match="does not have"):
        await bench.prepare(held)
    assert await bench.put(1) == digest
    await bench.prepare(held)
    assert bench.slots.residents == (digest,)
    await bench.adapters.close()


async def test_damaged_store_is_no_fault_of_the_request(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    held = bench.hold(await bench.put(1))
    (weights,) = (tmp_path / "store").rglob("*.safetensors")
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(AdapterStoreError, match="is something else"):
        await bench.prepare(held)
    weights.write_bytes(whole)
    await bench.prepare(held)
    await bench.adapters.close()


async def test_names_that_cannot_be_read_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(tmp_path)

    async def find(*arguments: object) -> None:
        raise NatsTimeoutError

    monkeypatch.setattr(bench.adapters, "_names", SimpleNamespace(find=find))
    with pytest.raises(AdapterStoreError, match="names of adapters cannot be read"):
        await bench.prepare(bench.hold("a-name"))
    await bench.adapters.close()


async def test_adapter_that_has_no_room_on_the_device_leaves_its_slot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tmp_path)
    held = bench.hold(await bench.put(1))

    def place(*arguments: object) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as full:
        full.setattr(AdapterTargets, "place", place)
        with pytest.raises(AdapterStoreError, match="out of memory"):
            await bench.prepare(held)
    await bench.prepare(held)
    await bench.adapters.close()


async def test_slots_of_adapters_that_made_room_are_cleared(tmp_path: Path) -> None:
    bench = Bench(tmp_path, num_slots=3)
    for seed in range(3):
        held = bench.hold(await bench.put(seed))
        await bench.prepare(held)
        bench.held.remove(held)
    assert (bench.slots.num_bytes, len(bench.slots.residents)) == (3 * PAGE_BYTES, 3)
    bench.slots.max_bytes = PAGE_BYTES
    await bench.prepare(bench.hold(await bench.put(3)))
    assert bench.placed == {0: bench.read[3], 1: None, 2: None}
    await bench.adapters.close()


async def test_request_waits_until_the_adapter_in_use_is_free(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    first, second = [bench.hold(await bench.put(seed)) for seed in (1, 2)]
    await bench.prepare(first)
    waiting = asyncio.create_task(bench.prepare(second))
    await asyncio.wait([waiting], timeout=0.2)
    assert not waiting.done()
    assert bench.slots.residents == (first.adapter,)
    bench.held.remove(first)
    await waiting
    assert bench.slots.residents == (second.adapter,)
    await bench.adapters.close()


async def test_adapter_that_its_request_gave_up_is_forgotten_and_not_one_that_waits(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    first, second = [bench.hold(await bench.put(seed)) for seed in (1, 2)]
    await bench.prepare(first)
    waiting = asyncio.create_task(bench.prepare(second))
    await until(lambda: len(bench.read) == 2)
    assert bench.forgotten == bench.read[:1]
    bench.held.remove(second)
    await waiting
    await until(lambda: bench.forgotten == bench.read)
    await bench.adapters.close()


async def test_batch_request_gives_way_to_a_person_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_adapters, "PATIENCE_S", 400.0)
    bench = Bench(tmp_path)
    job, person = bench.hold(await bench.put(1), lane="batch"), bench.hold(await bench.put(2))
    given_back: list[HeldRequest] = []

    def give_back(held: HeldRequest) -> None:
        given_back.append(held)
        bench.held.remove(held)

    bench.adapters.give_back = give_back
    await bench.prepare(job)
    async with asyncio.timeout(20):
        await bench.prepare(person)
    assert (given_back, bench.slots.residents) == ([job], (person.adapter,))
    await bench.adapters.close()


async def test_steady_flow_on_one_adapter_does_not_keep_another_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_adapters, "PATIENCE_S", 0.05)
    bench = Bench(tmp_path)
    busy, other = await bench.put(1), await bench.put(2)
    running = bench.hold(busy)
    await bench.prepare(running)
    placed = bench.hold(other)
    waiting = asyncio.create_task(bench.prepare(placed))
    await until(lambda: not bench.adapters.use(bench.hold(busy)))  # it leaves
    late = bench.hold(busy)
    after = asyncio.create_task(bench.prepare(late))
    await asyncio.sleep(0)
    for held in list(bench.held):
        if held.adapter == busy:
            bench.held.remove(held)
    await waiting
    assert bench.slots.residents == (other,)
    bench.held.remove(placed)
    await after
    assert bench.slots.residents == (busy,)
    await bench.adapters.close()


async def test_batch_requests_that_wait_keep_no_person_waiting(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.adapters.give_back = bench.held.remove
    await bench.prepare(bench.hold(await bench.put(1), lane="batch"))
    jobs = [bench.hold(await bench.put(seed), lane="batch") for seed in range(2, 8)]
    waiting = [asyncio.create_task(bench.prepare(job)) for job in jobs]
    await asyncio.wait(waiting, timeout=0.2)
    person = bench.hold(await bench.put(8))
    await bench.prepare(person)
    assert bench.slots.residents == (person.adapter,)
    assert not any(task.done() for task in waiting)
    bench.held.remove(person)
    async with asyncio.timeout(20):
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            waiting = [task for task in waiting if task not in done]
            for job in jobs:
                if job.adapter is not None and bench.held.is_current(job):
                    bench.held.remove(job)
    await bench.adapters.close()
