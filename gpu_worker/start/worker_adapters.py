"""What serves adapters in one worker: requests' loads, orders of gateways, and what heartbeats say of both."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from nats.aio.msg import Msg

from gpu_worker.adapters.config import VARIABLE, AdapterError
from gpu_worker.adapters.slots import AdapterSlots
from gpu_worker.consumer.held_request import HeldRequest, HeldRequests
from gpu_worker.consumer.request_adapters import RequestAdapters
from gpu_worker.engine.engine_thread import EngineThread
from shared.adapter_calls import AdapterBeat, AdapterOrder, AdapterReply
from shared.adapter_names import AdapterNames
from shared.adapter_store import AdapterStore, AdapterStoreError
from shared.background_tasks import BackgroundTasks
from shared.direct_client import DirectClient
from shared.errors import ConfigError, HeadraceError
from shared.features import ADAPTER_STORE
from shared.messages import UNDECODABLE, encode
from shared.nats_connection import SEND_ERRORS, inbox_prefix
from shared.subjects import adapter_subject

if TYPE_CHECKING:
    from gpu_worker.start.engine_setup import Adapting


_ERRORS: tuple[type[Exception], ...] = (HeadraceError, *SEND_ERRORS)
_GATEWAY_INBOX = f"{inbox_prefix('gateway')}."

_decode = msgspec.msgpack.Decoder(AdapterOrder).decode
_log = logging.getLogger(__name__)


@dataclass(eq=False)
class AdapterOrders:
    """Carries out orders; without `adapters` and a store it refuses them. Writes `adapters.named`.

    The adapters of `--lora-modules` go into the store, and heartbeats report their names. An operator's order for a
    name wins over them, so a restart undoes no `headrace adapter add`.
    """

    _nats: DirectClient
    _worker: str
    _adapters: RequestAdapters | None
    _store: AdapterStore | None
    _names: AdapterNames
    _tasks: BackgroundTasks = field(default_factory=BackgroundTasks)

    @property
    def beats(self) -> tuple[AdapterBeat, ...]:
        """What a heartbeat says of what this worker calls its own."""
        named = {} if self._adapters is None else self._adapters.named
        return tuple(AdapterBeat(name, digest) for name, digest in named.items())

    async def start(self, modules: Mapping[str, Path]) -> None:
        """Add the adapters of `--lora-modules`, and listen for orders; `ConfigError` if one cannot be served."""
        for name, directory in modules.items():
            try:
                await self._add(name, directory)
                await self._warn_of_other_meaning(name)
            except _ERRORS as error:
                problem = f"the adapter {name!r} of {directory} cannot be served: {error}"
                raise ConfigError(VARIABLE, problem) from None
        await self._nats.subscribe(adapter_subject(self._worker), cb=self._receive)

    async def _receive(self, message: Msg) -> None:
        if message.reply.startswith(_GATEWAY_INBOX):
            self._tasks.spawn(self._answer(message), "order of an adapter")

    async def _answer(self, message: Msg) -> None:
        try:
            await self._served().check(_decode(message.data).digest)
            reply = AdapterReply()
        except UNDECODABLE as error:
            reply = AdapterReply(f"the order cannot be read: {error}")
        except _ERRORS as error:
            reply = AdapterReply(str(error), is_fault=isinstance(error, AdapterStoreError))
        with contextlib.suppress(*SEND_ERRORS):
            await self._nats.publish(message.reply, encode(reply))

    async def _add(self, name: str, directory: Path) -> None:
        adapters, store = self._served(), self._store
        assert store is not None
        content = await store.put(directory)
        await adapters.check(content.digest)
        adapters.named[name] = content.digest
        _log.info("adapter %s: %s, rank %d, %d bytes", name, content.digest[:12], content.rank, content.num_bytes)

    async def _warn_of_other_meaning(self, name: str) -> None:
        found = await self._names.find(name, None)
        own = self._served().named[name]
        if found is not None and (found.content is None or found.content.digest != own):
            meaning = "was removed" if found.content is None else f"means {found.content.digest[:12]}"
            _log.warning(
                "adapter %s: the name %s by an operator's order, which stands: not %s", name, meaning, own[:12]
            )

    def _served(self) -> RequestAdapters:
        if self._adapters is None:
            raise AdapterError("the worker has no places for adapters; start it with HEADRACE_MAX_LORAS")
        return self._adapters


@dataclass(frozen=True, slots=True)
class AdapterAccess:
    """How adapters are had.

    Attributes:
        store: Where their files are.
        modules: Those that are added at the start.
        max_bytes: What they may take in memory.
        is_shared: Whether gateways and other workers have the same store.
    """

    store: AdapterStore
    modules: dict[str, Path]
    max_bytes: int
    is_shared: bool


class WorkerAdapters:
    """Adapters of one worker.

    Attributes:
        requests: None where there are no places for adapters.
        slots: Which adapter is in which place.
        orders: Carries out those of gateways, or refuses them.
    """

    def __init__(
        self,
        nats: DirectClient,
        worker: str,
        adapting: Adapting | None,
        access: AdapterAccess | None,
        engine: EngineThread,
        held: HeldRequests,
    ) -> None:
        names = AdapterNames(nats.jetstream())
        self._is_shared = access is not None and access.is_shared
        store, self._modules = (None, {}) if access is None else (access.store, access.modules)
        self.requests: RequestAdapters | None = None
        self.slots = AdapterSlots()
        if adapting is not None and access is not None:
            self.slots = AdapterSlots(adapting.num_slots, access.max_bytes)
            ways, ends = (adapting.read, adapting.place), (adapting.forget, adapting.check)
            self.requests = RequestAdapters(self.slots, *ways, access.store, names, engine, held, *ends)
        self.orders = AdapterOrders(nats, worker, self.requests, store, names)

    @property
    def features(self) -> tuple[str, ...]:
        """Features for heartbeats: a worker with a store of its own finds only the adapters added there."""
        return () if self.requests is None or not self._is_shared else (ADAPTER_STORE,)

    def make_way_by(self, give_back: Callable[[HeldRequest], None]) -> None:
        """Let batch requests give their adapters' places to people."""
        if self.requests is not None:
            self.requests.give_back = give_back

    async def start(self) -> None:
        """Add the adapters of the settings, and listen for orders; `ConfigError` if one cannot be served or stored."""
        await self.orders.start(self._modules)

    async def close(self) -> None:
        """Let go of the store."""
        if self.requests is not None:
            await self.requests.close()
