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
from pathlib import Path
from typing import Any, BinaryIO

from shared.adapter_calls import is_digest
from shared.adapter_files import (
    CONFIG_NAME,
    MAX_ADAPTER_BYTES,
    MAX_CONFIG_BYTES,
    NAMES,
    PIECE_BYTES,
    WEIGHTS_NAME,
    AdapterContent,
    AdapterFilesError,
    Hash,
    hash_start,
    header_bytes,
    read_content,
)
from shared.errors import HeadraceError
from shared.files import open_regular
from shared.objects.store import MissingObjectError, ObjectStore, StoreError, identity, put

# A store that takes longer for a call counts as away.
CALL_S = 30.0
# Jobs of batches wait for seven days at most, unless `headrace setup` says otherwise.
KEPT_S = 30 * 86400.0
_MAX_SWEPT = 64
_ADAPTERS = "headrace/adapters"
_MARKS = "headrace/unnamed-adapters"
_NOW = "now"
# A larger adapter is checked by its configuration and header before the rest is fetched.
CHECKED_FIRST_BYTES = 64 << 20


class AdapterStoreError(HeadraceError):
    """The store of adapters is away, or does not have an adapter; it may have it later."""


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
            written = hashlib.sha256()
            for name in NAMES:
                await self._write(content.digest, name, directory / name, written)
        if written.hexdigest() != content.digest:
            with _errors():
                await _answered(self._store.delete_folder(_folder(content.digest)))
            raise AdapterFilesError(f"{directory} changed while it was read; add it again when it is complete")
        return content

    async def num_bytes(self, digest: str) -> int | None:
        """Return the bytes of a stored adapter; None if it is not there, or only in part."""
        sizes = await self._sizes(digest)
        return None if sizes is None else sum(sizes.values())

    async def _sizes(self, digest: str) -> dict[str, int] | None:
        with _errors():
            found = {each.name: each.num_bytes for each in await _answered(self._store.objects(_folder(digest)))}
        return {name: found[name] for name in NAMES} if found.keys() >= set(NAMES) else None

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

    async def fetch(
        self,
        digest: str,
        directory: Path,
        max_bytes: int = MAX_ADAPTER_BYTES,
        check: Callable[[Path], object] = lambda _: None,
    ) -> int:
        """Write a stored adapter into a directory, checked against its digest; return its bytes.

        Of a large one `check` is called as soon as configuration and header are there, and zeros in place of the rest,
        in another thread. What it raises passes; the digest was not checked then.

        Raises:
            AdapterFilesError: It is larger than `max_bytes`.
            AdapterStoreError: It cannot be read, is not there, or the stored bytes have another digest.
        """
        sizes = await self._sizes(digest)
        if sizes is None:
            raise AdapterStoreError(f"{self.place} does not have the adapter {digest[:12]}")
        if (num_bytes := sum(sizes.values())) > max_bytes or sizes[CONFIG_NAME] > MAX_CONFIG_BYTES:
            limits = f"{max_bytes} have room (HEADRACE_MAX_LORA_BYTES), {MAX_CONFIG_BYTES} of them for {CONFIG_NAME}"
            raise AdapterFilesError(f"the adapter {digest[:12]} has {num_bytes} bytes; {limits}")
        read = hashlib.sha256()
        with _errors():
            if num_bytes > CHECKED_FIRST_BYTES:
                await self._check_first(digest, sizes, directory, check)
            for name in NAMES:
                hash_start(read, name, sizes[name])
                await self._read(digest, name, directory / name, sizes[name], read)
        if read.hexdigest() != digest:
            raise AdapterStoreError(f"what {self.place} has as the adapter {digest[:12]} is something else")
        return num_bytes

    async def close(self) -> None:
        """Let go of threads and connections."""
        await self._store.close()

    async def _write(self, digest: str, name: str, path: Path, written: Hash) -> None:
        writer = await _answered(self._store.writer(f"{_folder(digest)}/{name}"))
        try:
            with open_regular(path) as file:
                hash_start(written, name, os.fstat(file.fileno()).st_size)
                while piece := await asyncio.to_thread(file.read, PIECE_BYTES):
                    await asyncio.to_thread(written.update, piece)
                    await _answered(writer.write(piece))
            await _answered(writer.commit())
        finally:
            await writer.abort()

    async def _check_first(
        self, digest: str, sizes: dict[str, int], directory: Path, check: Callable[[Path], object]
    ) -> None:
        """Fetch the configuration and the header, and check them; the weights are a hole in the file meanwhile."""
        await self._read(digest, CONFIG_NAME, directory / CONFIG_NAME, sizes[CONFIG_NAME])
        weights, size = directory / WEIGHTS_NAME, sizes[WEIGHTS_NAME]
        start = await _answered(self._store.read(f"{_folder(digest)}/{WEIGHTS_NAME}", 0, 8))
        await self._read(digest, WEIGHTS_NAME, weights, size, end=8 + header_bytes(start, size))
        await asyncio.to_thread(os.truncate, weights, size)
        await asyncio.to_thread(check, directory)

    async def _read(
        self, digest: str, name: str, path: Path, size: int, read: Hash | None = None, end: int | None = None
    ) -> None:
        """Read a file of `size` bytes, to `end` or a little further, and add it to a digest."""
        start = 0
        with path.open("wb") as file:
            while end is None or start < end:
                piece = await _answered(self._store.read(f"{_folder(digest)}/{name}", start, PIECE_BYTES))
                if not piece:
                    return
                start += len(piece)
                if start > size:
                    raise StoreError(f"{self.place} has a file that grows")
                await asyncio.to_thread(_append, piece, file, read)


def _append(piece: bytes, file: BinaryIO, read: Hash | None) -> None:
    file.write(piece)
    if read is not None:
        read.update(piece)


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
