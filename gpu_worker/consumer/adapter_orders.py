"""Adapters of `--lora-modules`, and orders about adapters that gateways send while the worker runs.

The worker puts the content of its modules into the store and tells their names in heartbeats. What an operator says
of a name goes before that, so a restart undoes no `headrace adapter add`.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from nats.aio.msg import Msg

from gpu_worker.adapters.config import AdapterError
from gpu_worker.adapters.names import VARIABLE
from gpu_worker.consumer.request_adapters import RequestAdapters
from shared.adapter_calls import AdapterBeat, AdapterOrder, AdapterReply
from shared.adapter_names import AdapterNames
from shared.adapter_store import AdapterStore, AdapterStoreError
from shared.background_tasks import BackgroundTasks
from shared.direct_client import DirectClient
from shared.errors import ConfigError, HeadraceError
from shared.messages import UNDECODABLE, encode
from shared.nats_connection import SEND_ERRORS, inbox_prefix
from shared.subjects import adapter_subject

_ERRORS: tuple[type[Exception], ...] = (HeadraceError, *SEND_ERRORS)
_GATEWAY_INBOX = f"{inbox_prefix('gateway')}."

_decode = msgspec.msgpack.Decoder(AdapterOrder).decode
_log = logging.getLogger(__name__)


@dataclass(eq=False)
class AdapterOrders:
    """Carries out orders; without `adapters` and a store it refuses them. Writes `adapters.named`."""

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
