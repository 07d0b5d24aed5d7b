"""The adapters that names refer to, as this gateway has read them from NATS. A request looks its name up once.

A tenant's own name goes before one that all tenants share, and that before the names of workers' `--lora-modules`.
Other tenants' names are invisible. A name that workers of several models give belongs to the first model: a login for
one model must not take over another's requests.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from nats.aio.msg import Msg
from nats.js.errors import NotFoundError

from shared.adapter_calls import AdapterBeat, NamesRead
from shared.adapter_names import AdapterNames, NamedAdapter
from shared.direct_client import DirectClient
from shared.features import ADAPTER_STORE
from shared.messages import Heartbeat
from shared.nats_connection import SEND_ERRORS
from shared.streams import ADAPTERS_STREAM
from shared.subjects import ADAPTER_NAMES
from shared.task_supervisor import TaskSupervisor

REVIEW_S = 5.0
LEASE_S = 20.0
"""How long names stay valid after a read: a gateway that cannot read them again uses none after that."""

NOTHING_READ = NamesRead(0.0, 0)


@dataclass(frozen=True, slots=True)
class FoundAdapter:
    """The adapter of a name: its model, and the digest of its content."""

    model: str
    digest: str | None


class NamedAdapters:
    """The names. Only the follower of the stream writes them.

    Attributes:
        read: Position of the last read in the stream; None before the first.
        read_at: Monotonic seconds of the last read; None before the first.
    """

    def __init__(self) -> None:
        self.read: NamesRead | None = None
        self.read_at: float | None = None
        self._named: dict[tuple[str | None, str], NamedAdapter] = {}
        self._removed: set[tuple[str | None, str]] = set()

    @property
    def is_current(self) -> bool:
        """Whether names may be used: they were read, and not so long ago that another gateway may have changed them."""
        return self.read_at is not None and time.monotonic() - self.read_at < LEASE_S

    def find(self, name: str, tenant: str | None) -> NamedAdapter | None:
        """Return a tenant's adapter of a name, or else the shared one; None without either. No tenant: shared only."""
        return self._named.get((tenant, name)) or self._named.get((None, name))

    def was_removed(self, name: str, tenant: str | None) -> bool:
        """Whether an operator has removed a tenant's name, or that of all tenants, and neither means anything now."""
        return self.find(name, tenant) is None and not self._removed.isdisjoint({(tenant, name), (None, name)})

    def is_hidden(self, name: str) -> bool:
        """Whether an operator has removed a name for all tenants, even if workers use it."""
        return (None, name) in self._removed

    def of_tenant(self, tenant: str | None) -> list[NamedAdapter]:
        """Return the names that a tenant may use; its own hide shared ones."""
        own = [each for (owner, _), each in self._named.items() if owner in (tenant, None)]
        return [each for each in own if self.find(each.name, tenant) is each]

    def all(self) -> list[NamedAdapter]:
        """Return all names, for operators."""
        return list(self._named.values())

    def note(self, named: NamedAdapter) -> None:
        """Take in a record."""
        key = (named.tenant, named.name)
        if named.content is None:
            self._named.pop(key, None)
            self._removed.add(key)
        else:
            self._named[key] = named
            self._removed.discard(key)

    def clear(self) -> None:
        """Forget all: the stream was made anew."""
        self._named.clear()
        self._removed.clear()


class WorkersNames:
    """Which model's adapter each name of workers' own is: that of the model whose workers were heard with it first."""

    def __init__(self) -> None:
        self._models: dict[str, str] = {}

    def model_of(self, name: str) -> str | None:
        """Return the model that a name belongs to; None if no worker reports it."""
        return self._models.get(name)

    def note(self, heartbeat: Heartbeat) -> None:
        """Give unclaimed names of a heartbeat to its model."""
        for beat in heartbeat.adapters:
            self._models.setdefault(beat.name, heartbeat.model)

    def review(self, live: Collection[Heartbeat], known_models: Collection[str]) -> None:
        """Take each name from a model that is unknown now, or whose live workers no longer report it."""
        heard = {h.model for h in live}
        told = {(beat.name, h.model) for h in live for beat in h.adapters}
        self._models = {
            name: model
            for name, model in self._models.items()
            if (name, model) in told or (model in known_models and model not in heard)
        }
        for heartbeat in live:
            self.note(heartbeat)


def find_adapter(
    named: NamedAdapters,
    workers_names: WorkersNames,
    name: str,
    tenant: str | None,
    live: Iterable[Heartbeat],
    takers: Callable[[str], list[Heartbeat]],
) -> FoundAdapter | None:
    """Return the adapter that a tenant means by a name, and its model; None where it is unknown.

    What an operator has said goes before what workers call their own, who have to agree about that. The digest is None
    while they do not, while some cannot serve it, while there is no worker and none is coming, and while this gateway
    cannot read names.
    """
    told = named.find(name, tenant)
    if told is not None and told.content is not None:
        own, found = AdapterBeat(name, told.content.digest), takers(told.base)
        is_served = (
            bool(found) and named.is_current and all(ADAPTER_STORE in h.features or own in h.adapters for h in found)
        )
        return FoundAdapter(told.base, own.digest if is_served else None)
    model = None if named.is_hidden(name) else workers_names.model_of(name)
    if model is None or not any(h.model == model and any(beat.name == name for beat in h.adapters) for h in live):
        return None
    meanings = {tuple(beat.digest for beat in h.adapters if beat.name == name) for h in takers(model)}
    agreed = meanings.pop() if len(meanings) == 1 and named.is_current else ()
    return FoundAdapter(model, agreed[0] if agreed else None)


class AdapterNameFollower:
    """Reads the names at the start, when one changes, and every `REVIEW_S`; `tell` is called when there was news.

    A `tell` that fails is let be: each heartbeat tells the same.
    """

    def __init__(self, nats: DirectClient, named: NamedAdapters, tell: Callable[[], Awaitable[None]]) -> None:
        self._js = nats.jetstream()
        self._nats = nats
        self._names = AdapterNames(self._js)
        self._named = named
        self._tell = tell
        self._read = NOTHING_READ
        self._reading = asyncio.Lock()
        self._has_heard = asyncio.Event()

    async def start(self, tasks: TaskSupervisor) -> asyncio.Task[None]:
        """Follow the names from now on; return the task that does."""
        await self._nats.subscribe_direct(ADAPTER_NAMES, self._hear)
        with suppress(*SEND_ERRORS):
            await self.read()
        return tasks.every(0.0, partial(self._wait_and_read, REVIEW_S), "names of adapters")

    def _hear(self, message: Msg) -> None:
        self._has_heard.set()

    async def _wait_and_read(self, timeout_s: float) -> None:
        try:
            await self.read()
        finally:
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._has_heard.wait()

    async def read(self) -> None:
        """Apply new records of the stream; `nats.errors.Error` if NATS does not answer."""
        async with self._reading:
            self._has_heard.clear()
            began = time.monotonic()
            try:
                info = await self._js.stream_info(ADAPTERS_STREAM)
            except NotFoundError:
                # NATS was set up by an earlier version, or the stream was deleted: names cannot change.
                self._named.read_at = began
                return
            assert info.created is not None
            created = info.created.timestamp()
            if created != self._read.created or info.state.last_seq < self._read.seq:
                self._read = NamesRead(created, 0)
                self._named.clear()
            if info.state.last_seq > self._read.seq:
                async for seq, named in self._names.after(self._read.seq):
                    self._read = NamesRead(created, seq)
                    self._named.note(named)
                # The last record may be one that cannot be read.
                self._read = NamesRead(created, max(self._read.seq, info.state.last_seq))
            self._named.read_at = began
            if self._named.read != self._read:
                self._named.read = self._read
                with suppress(*SEND_ERRORS):
                    await self._tell()
