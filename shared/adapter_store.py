"""The contents of adapters (LoRA) in an object store, by the SHA-256 of their two files.

Contents with the same digest are stored once. Readers check the digest, so a store can lose an adapter and never
change one. Workers judge what an adapter computes; here it is bytes.

A content that no name refers to gets a mark, an empty object whose date says since when, and is deleted `KEPT_S` later.
A process that stores or names the content deletes the mark. Ages go by the store's clock alone.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Awaitable, Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from shared.adapter_calls import Digest, is_digest
from shared.errors import HeadraceError
from shared.files import open_regular
from shared.objects.store import MissingObjectError, ObjectStore, StoreError, identity, put

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
MAX_ADAPTER_BYTES = 8 << 30
MAX_CONFIG_BYTES = 1 << 20
MAX_TOLD_RANK = (1 << 20) - 1
"""Upper bound of the reported rank; workers check the ranks that they serve, which are far smaller."""
# A store that takes longer for a call counts as away.
CALL_S = 30.0
# Jobs of batches wait for seven days at most, unless `headrace setup` says otherwise.
KEPT_S = 30 * 86400.0
_MAX_SWEPT = 64
_ADAPTERS = "headrace/adapters"
_MARKS = "headrace/unnamed-adapters"
_NOW = "now"
_NAMES = (CONFIG_NAME, WEIGHTS_NAME)
_PIECE_BYTES = 4 << 20


class AdapterFilesError(HeadraceError):
    """The named files are not an adapter that can be stored, or the stored object is not an adapter."""


class AdapterStoreError(HeadraceError):
    """The store of adapters is away, or does not have an adapter; it may have it later."""


class AdapterContent(Struct, frozen=True, array_like=True):
    """The digest and size of both files of an adapter, and its rank if the configuration says one, else 0."""

    digest: Digest
    num_bytes: Annotated[int, Meta(ge=0, le=MAX_ADAPTER_BYTES)]
    rank: Annotated[int, Meta(ge=0, le=MAX_TOLD_RANK)] = 0


def content_digest(directory: Path) -> str:
    """Return the SHA-256 of an adapter's configuration and weights."""
    digest = hashlib.sha256()
    for name in _NAMES:
        with open_regular(directory / name) as file:
            digest.update(f"{name}\0{os.fstat(file.fileno()).st_size}\0".encode())
            while piece := file.read(_PIECE_BYTES):
                digest.update(piece)
    return digest.hexdigest()


def read_content(directory: Path) -> AdapterContent:
    """Read an adapter as PEFT saves it in a directory; `AdapterFilesError` if there is none, or it is too large."""
    try:
        sizes = [(directory / name).stat().st_size for name in _NAMES]
        if sizes[0] > MAX_CONFIG_BYTES or sum(sizes) > MAX_ADAPTER_BYTES:
            limits = f"at most {MAX_CONFIG_BYTES} and {MAX_ADAPTER_BYTES} are served"
            raise AdapterFilesError(f"{CONFIG_NAME} has {sizes[0]} bytes, and with the weights {sum(sizes)}; {limits}")
        with open_regular(directory / CONFIG_NAME) as file:
            config: Any = msgspec.json.decode(file.read(MAX_CONFIG_BYTES))
        digest = content_digest(directory)
    except OSError as error:
        raise AdapterFilesError(f"{error.filename} is missing or cannot be read ({error.strerror})") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise AdapterFilesError(f"{CONFIG_NAME} is not JSON: {error}") from None
    rank = config.get("r") if isinstance(config, dict) else None
    return AdapterContent(digest, sum(sizes), rank if type(rank) is int and 0 < rank <= MAX_TOLD_RANK else 0)


class AdapterStore:
    """Writes and reads contents. Errors of the store, and its silence, are an `AdapterStoreError`."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    @property
    def place(self) -> str:
        """How messages name the store."""
        return self._store.place

    async def put(self, directory: Path) -> AdapterContent:
        """Store the adapter in a directory, unless it is stored already.

        Raises:
            AdapterFilesError: It is not an adapter, or changes meanwhile.
            AdapterStoreError: It cannot be stored.
        """
        content = await asyncio.to_thread(read_content, directory)
        if await self.keep(content.digest) == content.num_bytes:
            return content
        with _errors():
            # Makes a directory that is not there yet.
            await _answered(identity(self._store))
            await _answered(self._store.check_room(content.num_bytes))
            for name in _NAMES:
                await self._write(content.digest, name, directory / name)
        if (await asyncio.to_thread(read_content, directory)).digest != content.digest:
            with _errors():
                await _answered(self._store.delete_folder(_folder(content.digest)))
            raise AdapterFilesError(f"{directory} changed while it was read; add it again when it is complete")
        return content

    async def num_bytes(self, digest: str) -> int | None:
        """Return the bytes of a stored adapter; None if it is not there, or only in part."""
        with _errors():
            found = {each.name: each.num_bytes for each in await _answered(self._store.objects(_folder(digest)))}
        return sum(found[name] for name in _NAMES) if found.keys() >= set(_NAMES) else None

    async def keep(self, digest: str) -> int | None:
        """Keep a content for another `KEPT_S` without a name; return its bytes as `num_bytes` does."""
        with _errors():
            await _answered(self._store.delete(f"{_MARKS}/{digest}"))
        return await self.num_bytes(digest)

    async def sweep(self, read_named: Callable[[], Awaitable[Collection[str]]]) -> list[str]:
        """Delete some contents that have had no name for `KEPT_S`, and return them. Several gateways may sweep at once.

        `read_named` returns the digests that names mean now; what it raises passes.
        """
        with _errors():
            stored = set(filter(is_digest, await self._folders()))
            await _answered(put(self._store, f"{_MARKS}/{_NOW}", b""))
            marked = await self._marked()
        unnamed, now = stored - set(await read_named()), marked.pop(_NOW, 0.0)
        with _errors():
            for digest in sorted(marked.keys() - unnamed)[:_MAX_SWEPT]:
                await _answered(self._store.delete(f"{_MARKS}/{digest}"))
            for digest in sorted(unnamed - marked.keys())[:_MAX_SWEPT]:
                await _answered(self._store.create(f"{_MARKS}/{digest}", b""))
        expired = [digest for digest in sorted(unnamed & marked.keys()) if now - marked[digest] > KEPT_S][:_MAX_SWEPT]
        return [digest for digest in expired if await self._delete(digest, now)]

    async def _delete(self, digest: str, now: float) -> bool:
        with _errors():
            # A process that has stored or named it since has deleted the mark before that.
            if now - (await self._marked()).get(digest, now) <= KEPT_S:
                return False
            await _answered(self._store.delete_folder(_folder(digest)))
        return True

    async def _folders(self) -> list[str]:
        try:
            found: list[str] = await _answered(self._store.folders(_ADAPTERS))
        except MissingObjectError:
            return []
        return found

    async def _marked(self) -> dict[str, float]:
        """Return when each content was marked."""
        return {each.name: each.modified for each in await _answered(self._store.objects(_MARKS))}

    async def fetch(self, digest: str, directory: Path, max_bytes: int = MAX_ADAPTER_BYTES) -> int:
        """Write a stored adapter into a directory, checked against its digest; return its bytes.

        Raises:
            AdapterFilesError: It is larger than `max_bytes`.
            AdapterStoreError: It cannot be read, is not there, or the stored bytes have another digest.
        """
        num_bytes = await self.num_bytes(digest)
        if num_bytes is None:
            raise AdapterStoreError(f"{self.place} does not have the adapter {digest[:12]}")
        if num_bytes > max_bytes:
            raise AdapterFilesError(f"the adapter {digest[:12]} has {num_bytes} bytes; {max_bytes} have room")
        with _errors():
            for name in _NAMES:
                await self._read(digest, name, directory / name, num_bytes)
        if await asyncio.to_thread(content_digest, directory) != digest:
            raise AdapterStoreError(f"what {self.place} has as the adapter {digest[:12]} is something else")
        return num_bytes

    async def close(self) -> None:
        """Let go of threads and connections."""
        await self._store.close()

    async def _write(self, digest: str, name: str, path: Path) -> None:
        writer = await _answered(self._store.writer(f"{_folder(digest)}/{name}"))
        try:
            with open_regular(path) as file:
                while piece := await asyncio.to_thread(file.read, _PIECE_BYTES):
                    await _answered(writer.write(piece))
            await _answered(writer.commit())
        finally:
            await writer.abort()

    async def _read(self, digest: str, name: str, path: Path, max_bytes: int) -> None:
        start = 0
        with path.open("wb") as file:
            while piece := await _answered(self._store.read(f"{_folder(digest)}/{name}", start, _PIECE_BYTES)):
                start += len(piece)
                if start > max_bytes:
                    raise StoreError(f"{self.place} has a file that grows")
                await asyncio.to_thread(partial(file.write, piece))


async def _answered(call: Any) -> Any:
    async with asyncio.timeout(CALL_S):
        return await call


@contextmanager
def _errors() -> Iterator[None]:
    try:
        yield
    except MissingObjectError as error:
        raise AdapterStoreError(f"an adapter is not in the store: {error}") from error
    except (StoreError, OSError) as error:
        reason = f"it does not answer within {CALL_S:g} s" if isinstance(error, TimeoutError) else str(error)
        raise AdapterStoreError(f"the store of adapters cannot be used: {reason}") from error


def _folder(digest: str) -> str:
    return f"{_ADAPTERS}/{digest}"
