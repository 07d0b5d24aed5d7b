"""Adapters on the wire: what workers and gateways tell of them, and the orders to load them while workers run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

from msgspec import Meta, Struct

from shared.bounds import UnixSeconds

MAX_ADAPTERS = 256
"""Names of adapters beside the model of a worker."""

ADAPTER_UNAVAILABLE = "adapter_unavailable"
"""Error code of a request whose adapter cannot be had at the moment."""

AdapterName = Annotated[str, Meta(min_length=1, max_length=128)]
Digest = Annotated[str, Meta(max_length=64, pattern="^[0-9a-f]{64}$")]
"""SHA-256 of an adapter's content, in hexadecimal digits."""


def is_digest(text: str) -> bool:
    """Whether a text reads as the digest of an adapter's content."""
    return len(text) == 64 and set(text) <= set("0123456789abcdef")


class AdapterBeat(Struct, frozen=True, array_like=True):
    """An adapter that a worker has: what clients ask for, and the SHA-256 of its content in hexadecimal digits."""

    name: AdapterName
    digest: Digest


AdapterBeats = Annotated[tuple[AdapterBeat, ...], Meta(max_length=MAX_ADAPTERS)]


_DIGEST_BYTES = 32
ResidentAdapters = Annotated[bytes, Meta(max_length=_DIGEST_BYTES * MAX_ADAPTERS)]
"""Digests of the adapters that a worker has in memory, one after another."""


def pack_residents(digests: Iterable[str]) -> ResidentAdapters:
    """Return digests in hexadecimal digits as a heartbeat has them."""
    return b"".join(map(bytes.fromhex, digests))


def is_resident(digest: str, residents: ResidentAdapters) -> bool:
    """Return whether a heartbeat lists this adapter."""
    wanted, starts = bytes.fromhex(digest), range(0, len(residents), _DIGEST_BYTES)
    return any(residents[start : start + _DIGEST_BYTES] == wanted for start in starts)


class NamesRead(Struct, frozen=True, array_like=True):
    """The last sequence that a gateway has read of the stream of names that was made at `created`, and of no other."""

    created: UnixSeconds
    seq: Annotated[int, Meta(ge=0, le=2**63 - 1)]


class AdapterOrder(Struct, frozen=True, tag="adapter"):
    """Read the content of this digest from the store; the name is for messages."""

    name: AdapterName
    digest: Digest


class AdapterReply(Struct, frozen=True, tag="adapter_reply"):
    """Why it was not done, if it was not; with `is_fault` it may be later or elsewhere: the adapter is not at fault."""

    error: str | None = None
    is_fault: bool = False
