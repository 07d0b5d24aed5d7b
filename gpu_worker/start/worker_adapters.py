"""What serves adapters in one worker: requests' loads, orders of gateways, and what heartbeats say of both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gpu_worker.adapters.slots import AdapterSlots
from gpu_worker.consumer.adapter_orders import AdapterOrders
from gpu_worker.consumer.held_request import HeldRequest, HeldRequests
from gpu_worker.consumer.request_adapters import RequestAdapters
from gpu_worker.engine.engine_thread import EngineThread
from shared.adapter_names import AdapterNames
from shared.adapter_store import AdapterStore
from shared.direct_client import DirectClient
from shared.features import ADAPTER_STORE

if TYPE_CHECKING:
    from gpu_worker.start.engine_setup import Adapting


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
        slots: What is in which place.
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
            ways = (adapting.read, adapting.place)
            self.requests = RequestAdapters(self.slots, *ways, access.store, names, engine, held, adapting.forget)
        self.orders = AdapterOrders(nats, worker, self.requests, store, names)

    @property
    def features(self) -> tuple[str, ...]:
        """What heartbeats say of them: with a store of its own, a worker finds in it what was added there alone."""
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
