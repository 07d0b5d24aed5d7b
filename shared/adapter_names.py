"""The names of adapters, in NATS: a record for each name of a tenant, and for each that all tenants share.

Gateways write them, for operators. Names of workers' `--lora-modules` are in heartbeats, and apply where there is no
record. A name is changed with compare-and-set. Followers of the names resume the stream at the last record read, so
nothing is missed while NATS is away. A removed name has a record without content.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Annotated

import msgspec
from msgspec import Meta, Struct
from nats.js import JetStreamContext
from nats.js.api import RawStreamMsg

from shared.adapter_calls import AdapterName
from shared.adapter_files import AdapterContent
from shared.bounds import TenantName
from shared.errors import InvalidNameError
from shared.messages import UNDECODABLE
from shared.publication import last_message, messages_after, publish_expecting
from shared.streams import ADAPTERS_STREAM
from shared.subjects import ADAPTER_NAMES, adapter_name_subject

_TRIES = 16


class NamedAdapter(Struct, frozen=True):
    """Record of a name.

    Attributes:
        tenant: Owner of the name; None for all tenants.
        base: The model that the adapter belongs to.
        content: None once the name was removed.
        changed: Unix seconds.
    """

    name: AdapterName
    tenant: TenantName | None
    base: Annotated[str, Meta(min_length=1, max_length=128)]
    content: AdapterContent | None
    changed: float = 0.0


class AdapterNames:
    """Reads and changes names. Calls raise errors of NATS where it does not answer or refuses."""

    def __init__(self, js: JetStreamContext) -> None:
        self._js = js

    async def put(
        self, name: str, tenant: str | None, base: str, content: AdapterContent | None, *, is_known: bool = False
    ) -> bool:
        """Let a name mean a content, None for nothing; return whether that is a change.

        `is_known`: workers have given the name, so that it means something although it has no record yet.
        """
        subject = adapter_name_subject(tenant, name)
        for _ in range(_TRIES):
            found = await last_message(self._js, ADAPTERS_STREAM, subject)
            known = _read(found)
            if known is None:
                if content is None and not is_known:
                    return False
            elif known.content == content and (content is None or known.base == base):
                return False
            base = known.base if content is None and known is not None else base
            payload = msgspec.msgpack.encode(NamedAdapter(name, tenant, base, content, time.time()))
            seq = 0 if found is None else found.seq
            if await publish_expecting(self._js, subject, payload, seq or 0) is not None:
                return True
        raise TimeoutError(f"the name {name[:64]!r} is changed by others all the time")

    async def find(self, name: str, tenant: str | None) -> NamedAdapter | None:
        """Return the record of a tenant's name, or else of the shared one.

        None if no operator has named it; without content if one has removed it for all.
        """
        named = None
        for owner in dict.fromkeys((tenant, None)):
            found = await last_message(self._js, ADAPTERS_STREAM, adapter_name_subject(owner, name))
            named = _read(found)
            if named is not None and named.content is not None:
                break
        return named

    async def after(self, seq: int) -> AsyncIterator[tuple[int, NamedAdapter]]:
        """Yield the records that are stored after one, in their order, each with its sequence."""
        async for stored, found in messages_after(self._js, ADAPTERS_STREAM, ADAPTER_NAMES, seq):
            if (named := _read(found)) is not None:
                yield stored, named


def _read(message: RawStreamMsg | None) -> NamedAdapter | None:
    """Return a record; None if it cannot be read, or is of another name than its subject, which permissions protect."""
    if message is None:
        return None
    try:
        named = msgspec.msgpack.decode(message.data or b"", type=NamedAdapter)
        return named if adapter_name_subject(named.tenant, named.name) == message.subject else None
    except (*UNDECODABLE, InvalidNameError):
        return None
