"""Contents of adapters that no name means any more leave the store. Every gateway sweeps; it makes no difference."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from gateway.fleet.fleet import Fleet
from shared.adapter_store import AdapterStore, AdapterStoreError
from shared.nats_connection import SEND_ERRORS

SWEEP_INTERVAL_S = 3600.0
_ERRORS: tuple[type[Exception], ...] = (AdapterStoreError, *SEND_ERRORS)

_log = logging.getLogger(__name__)


async def sweep_forever(store: AdapterStore, fleet: Fleet, read_names: Callable[[], Awaitable[None]]) -> None:
    """Sweep once an interval. The first one is over before the first sweep: workers have told their names by then."""
    while True:
        await asyncio.sleep(SWEEP_INTERVAL_S)
        try:
            await sweep(store, fleet, read_names)
        except _ERRORS as error:
            _log.warning("adapters without a name were not deleted: %r", error)


async def sweep(store: AdapterStore, fleet: Fleet, read_names: Callable[[], Awaitable[None]]) -> None:
    """Delete contents that have long meant nothing to operators and workers; `AdapterStoreError`, or NATS's errors."""

    async def read_named() -> set[str]:
        await read_names()
        named = fleet.named_adapters
        if named.read is None:
            raise AdapterStoreError("NATS has no names of adapters: run `headrace setup`")
        told = {beat.digest for heartbeat in fleet.workers() for beat in heartbeat.adapters}
        return told | {each.content.digest for each in named.all() if each.content is not None}

    for digest in await store.sweep(read_named):
        _log.info("adapter %s: deleted from %s; no name has meant it for long", digest[:12], store.place)
