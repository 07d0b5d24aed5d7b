"""Adapters on the wire: what workers tell of theirs, and the orders to load and unload them while workers run."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

MAX_ADAPTERS = 256
"""Names of adapters beside the model of a worker."""

AdapterName = Annotated[str, Meta(min_length=1, max_length=128)]


class AdapterBeat(Struct, frozen=True, array_like=True):
    """An adapter that a worker has: what clients ask for, and the SHA-256 of its content in hexadecimal digits."""

    name: AdapterName
    digest: Annotated[str, Meta(max_length=64, pattern="^[0-9a-f]{64}$")]


AdapterBeats = Annotated[tuple[AdapterBeat, ...], Meta(max_length=MAX_ADAPTERS)]


class AdapterOrder(Struct, frozen=True, tag="adapter"):
    """Load an adapter under a name, or unload it.

    Attributes:
        path: Its directory on the worker's host; None unloads.
    """

    name: AdapterName
    path: Annotated[str, Meta(min_length=1, max_length=4096)] | None = None


class AdapterReply(Struct, frozen=True, tag="adapter_reply"):
    """What became of it.

    Attributes:
        error: Why it was not done; None when it was.
    """

    error: str | None = None
