"""What a store of files can do: whole objects appear at once or not at all, and are read in ranges.

Keys are ours: `<tenant>/files/...`, made of encoded names and ids, never of what a client calls something.
"""

from __future__ import annotations

import re
import secrets
from typing import NamedTuple, Protocol

from shared.errors import HeadraceError

_KEY = re.compile(r"[A-Za-z0-9_-]{1,400}(/[A-Za-z0-9_-][A-Za-z0-9_.-]{0,250}){1,6}")


_IDENTITY = "headrace/store/identity"


class StoreError(HeadraceError):
    """The store cannot be reached, read or written; the message names it and says why."""


class StoreAwayError(StoreError):
    """The storage behind the store does not answer at present: a mount that is stale, a disk that fails."""


class StoreFullError(StoreError):
    """The store has no room left."""


class MissingObjectError(StoreError):
    """There is no such object."""


class StoredObject(NamedTuple):
    """An object in a list. `name` is the last part of its key, `modified` Unix seconds by the store's clock."""

    name: str
    num_bytes: int
    modified: float


class ObjectWriter(Protocol):
    """Writes one object, invisible until `commit`. A failure raises `StoreError`."""

    async def write(self, data: bytes) -> None:
        """Add bytes."""

    async def commit(self) -> None:
        """Make the object visible, in the place of one of the same key; it is on the disk when this returns."""

    async def abort(self) -> None:
        """Discard the written bytes; does nothing after `commit`."""


class ObjectStore(Protocol):
    """A directory or a bucket. Failures raise a `StoreError`, unless a method names another.

    Attributes:
        place: How messages name it.
        is_local: Only processes of this machine, or those that mount the same directory, reach it.
    """

    place: str
    is_local: bool

    async def create(self, key: str, data: bytes) -> None:
        """Store a small object unless there is one of this key."""

    async def check_room(self, num_bytes: int) -> None:
        """Raise `StoreFullError` if the store knows that it has no room for this many bytes."""

    async def writer(self, key: str) -> ObjectWriter:
        """Begin to write an object."""

    async def read(self, key: str, start: int = 0, num_bytes: int | None = None) -> bytes:
        """Return bytes of an object, fewer at its end, all without a number; `MissingObjectError` if there is none."""

    async def objects(self, folder: str) -> list[StoredObject]:
        """Return the objects right in a folder, in the order of their names."""

    async def folders(self, folder: str = "") -> list[str]:
        """Return the names of the folders right in a folder; those at the top are encoded names of tenants."""

    async def delete(self, key: str) -> None:
        """Delete an object; one that is not there is deleted already."""

    async def delete_folder(self, folder: str) -> None:
        """Delete the objects right in a folder."""

    async def close(self) -> None:
        """Let go of threads and connections."""


async def identity(store: ObjectStore) -> str:
    """Return the name that a store got at its first use: gateways with other stores do not have its files.

    Only the first use writes: a gateway must be able to start again while the store is full.
    """
    if not (name := await known_identity(store)):
        await store.create(_IDENTITY, secrets.token_hex(16).encode())
        name = await known_identity(store)
    return name


async def known_identity(store: ObjectStore) -> str:
    """Return the identity of a store; empty for one that was never used."""
    try:
        return (await store.read(_IDENTITY)).decode("ascii", "replace")
    except MissingObjectError:
        return ""


def check_key(key: str) -> str:
    """Return a key as it is; ours have no part that leads elsewhere."""
    assert _KEY.fullmatch(key), f"{key[:80]!r} is not a key of an object"
    return key


async def put(store: ObjectStore, key: str, data: bytes) -> None:
    """Store a small object whole."""
    writer = await store.writer(key)
    try:
        await writer.write(data)
        await writer.commit()
    finally:
        await writer.abort()
