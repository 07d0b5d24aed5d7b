"""Loads and unloads adapters while requests run, as an operator asks by a gateway.

A name that is loaded again means both contents for a while: gateways take the newest that all workers have, so no
request is refused in between, and each is answered by the one that it names.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from nats.aio.msg import Msg

from gpu_worker.adapters.config import AdapterError
from gpu_worker.adapters.loaded import LoadedAdapters, check_name
from gpu_worker.consumer.held_request import HeldRequests
from gpu_worker.engine.engine_thread import EngineThread
from shared.adapter_calls import AdapterOrder, AdapterReply
from shared.background_tasks import BackgroundTasks
from shared.direct_client import DirectClient
from shared.messages import UNDECODABLE, encode
from shared.nats_connection import SEND_ERRORS, inbox_prefix
from shared.subjects import adapter_subject

if TYPE_CHECKING:
    from gpu_worker.layers.adapters import AdapterTargets, Packed

OVERLAP_S = 10.0
"""For how long a name that was loaded again means what it meant before, too: heartbeats are heard by then."""
_GATEWAY_INBOX = f"{inbox_prefix('gateway')}."

_log = logging.getLogger(__name__)


class AdapterOrders:
    """Carries out one order after another; only it changes what is loaded once the worker runs."""

    def __init__(
        self,
        nats: DirectClient,
        worker: str,
        engine: EngineThread,
        held: HeldRequests,
        adapters: LoadedAdapters,
        targets: AdapterTargets | None,
        renamed: tuple[tuple[str, str], ...] = (),
    ) -> None:
        self._nats = nats
        self._worker = worker
        self._engine = engine
        self._held = held
        self._adapters = adapters
        self._targets = targets
        self._renamed = renamed
        self._one_at_a_time = asyncio.Lock()
        self._tasks = BackgroundTasks()
        self._decode = msgspec.msgpack.Decoder(AdapterOrder).decode

    async def start(self) -> None:
        """Listen for orders."""
        await self._nats.subscribe(adapter_subject(self._worker), cb=self._receive)

    async def _receive(self, message: Msg) -> None:
        if message.reply.startswith(_GATEWAY_INBOX):
            self._tasks.spawn(self._answer(message), "order of an adapter")

    async def _answer(self, message: Msg) -> None:
        try:
            order = self._decode(message.data)
            async with self._one_at_a_time:
                await self._carry_out(order)
            reply = AdapterReply()
        except UNDECODABLE as error:
            reply = AdapterReply(f"the order cannot be read: {error}")
        except AdapterError as error:
            reply = AdapterReply(str(error))
        with contextlib.suppress(*SEND_ERRORS):
            await self._nats.publish(message.reply, encode(reply))

    async def _carry_out(self, order: AdapterOrder) -> None:
        if order.path is None:
            if not self._adapters.has(order.name):
                raise AdapterError(f"there is no adapter {order.name!r}")
            self._adapters.unlist(order.name)
            _log.info("adapter %s unloaded", order.name)
            return
        if self._targets is None:
            raise AdapterError("the worker has no places for adapters; start it with HEADRACE_MAX_LORAS")
        # Torch is there where adapters can be.
        from gpu_worker.adapters.modules import read_module

        check_name(order.name)
        adapter, digest = await asyncio.to_thread(read_module, Path(order.path), self._targets, self._renamed)
        if not self._adapters.is_resident(digest):
            packed = await asyncio.to_thread(self._targets.pack, adapter.low_ranks)
            await self._place(digest, packed, adapter.max_rank)
        self._adapters.put(order.name, digest)
        _log.info("adapter %s loaded: %s, rank %d", order.name, digest[:12], adapter.max_rank)
        asyncio.get_running_loop().call_later(OVERLAP_S, partial(self._adapters.unlist_older, order.name, digest))

    async def _place(self, digest: str, packed: Packed, max_rank: int) -> None:
        targets, placed, loop = self._targets, asyncio.Event(), asyncio.get_running_loop()
        assert targets is not None
        used = {held.sequence.adapter for held in self._held if held.sequence is not None}
        slot = self._adapters.take_slot(used)
        if slot is None:
            problem = "all have a name or are in use; unload one, or start the worker with a larger HEADRACE_MAX_LORAS"
            raise AdapterError(f"there is no place for it among {targets.num_slots}: {problem}")

        def place() -> None:
            targets.place(slot, packed, max_rank)
            loop.call_soon_threadsafe(placed.set)

        self._engine.call(place)
        await placed.wait()
        self._adapters.add(digest, slot)
