"""The adapters of requests on their way into slots: names resolved, contents read from the store, room made.

A request keeps its adapter in memory for as long as it is held. Where all slots are in use a request waits for one:
after `PATIENCE_S` an adapter is picked that gets no new requests until its slot is free, so busy adapters cannot keep
others out for ever. Batch requests give way to people at once: those that run are given back, and those that wait
load nothing while a person waits. Threads read and pack adapters, at other ranks too, which receive them meanwhile; the
engine's own thread only places finished ones, between two steps.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import structs

from gpu_worker.adapters.config import AdapterError
from gpu_worker.adapters.slots import AdapterSlots
from gpu_worker.consumer.held_request import HeldRequest, HeldRequests
from gpu_worker.engine.engine_thread import EngineThread
from shared.adapter_calls import is_digest
from shared.adapter_files import AdapterFilesError
from shared.adapter_names import AdapterNames
from shared.adapter_store import AdapterStore, AdapterStoreError
from shared.errors import BadRequestError
from shared.files import TemporaryFolder
from shared.messages import Request
from shared.nats_connection import SEND_ERRORS

if TYPE_CHECKING:
    from gpu_worker.adapters.reader import PackedAdapter

PATIENCE_S = 1.0
MAX_WAITING = 32
"""People's requests that wait here for adapters at once; others are left to other workers for a moment."""
UNAVAILABLE_S = 2.0
"""For how long a batch request is kept whose adapter cannot be had."""
_CONCURRENT_LOADS = 4
_MAX_REFUSED = 256
_SMOOTHING = 0.3

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Refusal:
    """Why an adapter is not served, and whether it never will be."""

    reason: str
    is_final: bool

    def error(self) -> BadRequestError:
        """Return the error of its requests."""
        return BadRequestError(self.reason, "model", "adapter_refused")


@dataclass(eq=False)
class RequestAdapters:
    """Loads adapters for the requests of one worker. Alone writes `slots`.

    Attributes:
        named: Digests of this worker's own adapters by name, for requests from no gateway; `AdapterOrders` writes it.
        load_s: About how long a load takes, in seconds; 0 before the first.
        give_back: Called with a batch request whose adapter has to make room for a person's.
        _forget: Called on the engine's thread with each adapter that was read and placed, or given up.
        _check_files: Raises `AdapterError` for files that are not served, by their configuration and header alone.
    """

    slots: AdapterSlots
    _read_files: Callable[[Path], PackedAdapter]
    _place_in_slot: Callable[[int, PackedAdapter | None], None]
    _store: AdapterStore
    _names: AdapterNames
    _engine: EngineThread
    _held: HeldRequests
    _forget: Callable[[PackedAdapter], object] = lambda _: None
    _check_files: Callable[[Path], object] = lambda _: None
    named: dict[str, str] = field(default_factory=dict)
    load_s: float = 0.0
    give_back: Callable[[HeldRequest], None] | None = None
    # Requests that wait for an adapter, and which; those that have one are found by `HeldRequest.adapter`.
    _wanted: dict[HeldRequest, str] = field(default_factory=dict)
    _loading: dict[str, asyncio.Task[bool]] = field(default_factory=dict)
    _loads: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_CONCURRENT_LOADS))
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _leaving: str | None = None
    # Why adapters are refused. Content never changes, so this is final where the digest was checked.
    _refused: OrderedDict[str, _Refusal] = field(default_factory=OrderedDict)

    def __post_init__(self) -> None:
        self._held.on_removed.append(self._note_removed)

    def _note_removed(self, held: HeldRequest) -> None:
        if self._wanted.pop(held, None) is not None or held.adapter is not None:
            self._changed.set()

    def is_crowded(self, request: Request) -> bool:
        """Whether a person's request has to wait for its adapter behind those of too many others."""
        digest = request.adapter
        if digest is None or not self._loading or self.is_resident(digest):
            return False
        return sum(map(_is_for_person, self._wanted)) >= MAX_WAITING

    def use(self, held: HeldRequest) -> bool:
        """Keep a request's adapter for it if it is resident; return whether it is."""
        digest = held.request.adapter
        if digest is None or not self.is_resident(digest):
            return False
        held.adapter = digest
        self.slots.use(digest)
        return True

    async def prepare(self, held: HeldRequest) -> None:
        """Have a request's adapter in a slot, and name it by its digest. It may have been dropped when this returns.

        Raises:
            BadRequestError: There is no such adapter, or it cannot be served.
            AdapterStoreError: The store, or NATS, does not answer or lacks it.
        """
        try:
            await self._prepare(held)
        except AdapterStoreError:
            if held.request.lane == "batch":
                # It is given to another worker, which would try at once and in vain.
                await asyncio.sleep(UNAVAILABLE_S)
            raise

    async def _prepare(self, held: HeldRequest) -> None:
        digest = await self._digest(held.request)
        if not self._held.is_current(held):
            return
        held.request = structs.replace(held.request, adapter=digest)
        self._wanted[held] = digest
        self._changed.set()
        try:
            while self._held.is_current(held) and not self.use(held):
                if digest == self._leaving or self._gives_way(digest):
                    await self._change()
                else:
                    await self._load(digest)
        finally:
            self._wanted.pop(held, None)
            self._changed.set()

    async def check(self, digest: str) -> None:
        """Read an adapter as a request would have it; it stays where there is room. It may raise as `prepare` does."""
        while self.slots.slot(digest) is None and not await self._load(digest):
            await self._change()

    async def _digest(self, request: Request) -> str:
        asked = request.adapter
        assert asked is not None
        if is_digest(asked):
            return asked
        try:
            found = await self._names.find(asked, request.tenant)
        except SEND_ERRORS as error:
            raise AdapterStoreError(f"the names of adapters cannot be read: {error!r}") from error
        if found is None and asked in self.named:
            return self.named[asked]
        if found is None or found.content is None or found.base != request.model:
            raise BadRequestError(f"adapter: {request.model!r} has no adapter {asked[:64]!r}.", "adapter")
        return found.content.digest

    def is_resident(self, digest: str) -> bool:
        """Return whether requests can use an adapter at once."""
        return digest != self._leaving and self.slots.slot(digest) is not None

    def _gives_way(self, digest: str) -> bool:
        """Whether only batch requests wait for an adapter while a person waits for another one."""
        for_people = self._wanted_by_people()
        return bool(for_people) and digest not in for_people and digest in self._wanted.values()

    def _wanted_by_people(self) -> set[str]:
        return {digest for held, digest in self._wanted.items() if _is_for_person(held)}

    async def _load(self, digest: str) -> bool:
        """Load an adapter, once for all that wait for it; return whether it was read, be there room for it or not."""
        refusal = self._refused.get(digest)
        if refusal is not None and refusal.is_final:
            raise refusal.error()
        task = self._loading.get(digest)
        if task is None:
            loads = self._load_now(digest)
            task = self._loading[digest] = asyncio.create_task(loads, name=f"adapter {digest[:12]}")
            task.add_done_callback(partial(self._end_load, digest))
        # A waiting request may be cancelled; the others still want the adapter.
        return await asyncio.shield(task)

    def _end_load(self, digest: str, task: asyncio.Task[bool]) -> None:
        """Log in a sentence why an adapter was not loaded; of a refusal, `_refuse` has done so once."""
        self._loading.pop(digest, None)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, AdapterStoreError):
            _log.warning("adapter %s was not loaded: %s", digest[:12], error)
        elif error is not None and not isinstance(error, BadRequestError):
            _log.error("adapter %s was not loaded", digest[:12], exc_info=error)

    def _refuse(self, digest: str, error: AdapterError | AdapterFilesError) -> BadRequestError:
        refusal = _Refusal(f"The adapter cannot be served: {error}.", isinstance(error, AdapterError))
        if self._refused.get(digest) != refusal:
            _log.warning("adapter %s is refused: %s", digest[:12], error)
        self._refused[digest] = refusal
        self._refused.move_to_end(digest)
        while len(self._refused) > _MAX_REFUSED:
            self._refused.popitem(last=False)
        return refusal.error()

    async def _load_now(self, digest: str) -> bool:
        async with self._loads:
            if self._gives_way(digest):
                return False
            started = time.monotonic()
            try:
                adapter = await self._read(digest)
            except (AdapterError, AdapterFilesError) as error:
                raise self._refuse(digest, error) from error
            took_s = time.monotonic() - started
            self.load_s += (took_s - self.load_s) * (_SMOOTHING if self.load_s else 1.0)
            try:
                async with self._turn:
                    if (slot := await self._free_slot(digest, adapter.num_bytes)) is not None:
                        await self._place(slot, adapter)
                        self.slots.add(digest, slot)
                        _log.info("adapter %s loaded in %.3f s: rank %d", digest[:12], took_s, adapter.max_rank)
            finally:
                self._engine.call(partial(self._forget, adapter))
        return True

    async def _read(self, digest: str) -> PackedAdapter:
        with TemporaryFolder("headrace-lora-") as name:
            await self._store.fetch(digest, Path(name), self.slots.max_bytes, self._check)
            adapter = await asyncio.to_thread(self._read_files, Path(name))
        if adapter.num_bytes > self.slots.max_bytes:
            self._engine.call(partial(self._forget, adapter))
            problem = f"it takes {adapter.num_bytes} bytes in memory, and HEADRACE_MAX_LORA_BYTES is"
            raise AdapterError(f"{problem} {self.slots.max_bytes}")
        return adapter

    def _check(self, directory: Path) -> None:
        """Check files whose digest is not known yet."""
        try:
            self._check_files(directory)
        except AdapterError as error:
            raise AdapterFilesError(str(error)) from None

    async def _free_slot(self, digest: str, num_bytes: int) -> int | None:
        """Return a slot as soon as there is room; None once no request wants it, or it gives way to a person's."""
        asked_at = time.monotonic()
        try:
            while not self._gives_way(digest):
                # Requests that wait for a resident adapter are about to use it, unless it is leaving.
                waiting = set(self._wanted.values()) - {self._leaving}
                used = waiting | {held.adapter for held in self._held if held.adapter is not None}
                slot = self.slots.take(num_bytes, used)
                if slot is not None or digest not in waiting:
                    return slot
                if not self._make_way(digest):
                    if self._leaving is None and time.monotonic() - asked_at >= PATIENCE_S:
                        self._leaving = self.slots.residents[0]
                    await self._change()
            return None
        finally:
            self._leaving = None
            self._changed.set()

    def _make_way(self, digest: str) -> bool:
        """Give back the batch requests of an adapter that no person uses; return whether there is one."""
        for_people = self._wanted_by_people()
        if digest not in for_people or self.give_back is None:
            return False
        kept = (for_people - {self._leaving}) | {held.adapter for held in self._held if _is_for_person(held)}
        victims = {held.adapter for held in self._held} - kept
        victim = next((resident for resident in self.slots.residents if resident in victims), None)
        users = [held for held in self._held if held.adapter == victim and victim is not None]
        for held in users:
            self.give_back(held)
        return bool(users)

    async def _change(self) -> None:
        """Wait until a request has left, or for a moment."""
        self._changed.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE_S / 4):
                await self._changed.wait()

    async def _place(self, slot: int, adapter: PackedAdapter) -> None:
        loop = asyncio.get_running_loop()
        problem: asyncio.Future[Exception | None] = loop.create_future()
        emptied, self.slots.emptied = self.slots.emptied - {slot}, set()

        def told(error: Exception | None) -> None:
            if not problem.done():
                problem.set_result(error)

        def place() -> None:
            error = None
            try:
                for other in emptied:
                    self._place_in_slot(other, None)
                self._place_in_slot(slot, adapter)
            except Exception as raised:  # the device may have no memory for it; the engine goes on
                error = raised
            loop.call_soon_threadsafe(told, error)

        try:
            self._engine.call(place)
            if (error := await problem) is not None:
                raise AdapterStoreError(f"it cannot be placed in memory ({error})") from error
        except BaseException:
            self.slots.release(slot)
            raise

    async def close(self) -> None:
        """Let go of the store."""
        await self._store.close()


def _is_for_person(held: HeldRequest) -> bool:
    return held.request.lane == "interactive" or held.is_background
