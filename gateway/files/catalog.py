"""The files of all tenants in one store: each as its bytes, `<tenant>/files/<id>.data`, and its record, `<id>.json`.

The record is written after the bytes and deleted before them: a file exists while its record does. Another tenant's
file is not found, since its tenant is part of the key. Owns nothing but the counts of uploads on their way, whose
lists are read, and what the last uploads found.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, get_args
from weakref import WeakValueDictionary

import msgspec

from gateway.admission.stored_reads import ReadSize
from gateway.errors import ApiError
from gateway.files.objects import FILE_ID, FileRecord, Purpose
from gateway.metrics import GatewayMetrics
from shared.errors import InvalidNameError
from shared.log_limit import LogLimit
from shared.objects.store import (
    MissingObjectError,
    ObjectStore,
    StoredObject,
    StoreError,
    StoreFullError,
    identity,
    known_identity,
    put,
)
from shared.subjects import decode_name, encode_name
from shared.tenant_bounds import counted

READ_BYTES = 1 << 20
# Of one tenant: each upload and each list looks at all of them.
MAX_FILES = 10_000
SWEEP_INTERVAL_S = 3600.0
_RECORD = ".json"
_DATA = ".data"
# An upload may take this long; bytes without a record are older than that when they are deleted.
_ORPHAN_S = 86_400.0
_CONCURRENT_READS = 32
# An upload is let in by what the one before it found stored, if that was so lately, of the last tenants.
_KNOWN_S = 60.0
_MAX_KNOWN = 1024
_decode = msgspec.json.Decoder(FileRecord).decode

_log = logging.getLogger(__name__)


class _Stored(NamedTuple):
    """What an upload found stored of its tenant, itself among it; `at` by `time.monotonic()`."""

    at: float
    num_files: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class ReadableFile:
    """A file, whole or still growing: its record so far, and how its bytes are read."""

    record: FileRecord
    read: Callable[[int, int], Awaitable[bytes]]


@dataclass(slots=True)
class Hooks:
    """What batches know of files.

    Attributes:
        growing: Returns a file that a running batch writes.
        user_of: Returns the id of a running batch that reads a file, and counts the records that it looks at.
    """

    growing: Callable[[str, str], Awaitable[ReadableFile | None]]
    user_of: Callable[[str, str, ReadSize], Awaitable[str | None]]


class FileCatalog:
    """Reads, writes, lists and deletes the files in a store. `hooks` is what batches know; None without batches.

    `get`, `page`, `room`, `read_whole` and `delete` answer clients and raise `ApiError`: 503 if the store fails
    (`file_store_unavailable`), 507 if it is full, 400 beyond a quota. `find`, `check_stored`, `write`, `publish`,
    `write_part`, `read` and `read_part` raise `StoreError`, and `MissingObjectError` for a file that is missing. What
    `write` could not store leaves nothing behind.

    Attributes:
        identity: Of the store; empty until `open` has succeeded.
        now: Returns the time by which files expire, in Unix seconds.
    """

    def __init__(
        self, store: ObjectStore, tenant_bytes: int, metrics: GatewayMetrics, now: Callable[[], float] = time.time
    ) -> None:
        """Let each tenant store up to `tenant_bytes`; count failures of the store in `metrics`.

        `now` has to be a clock that all gateways go by: a file that has expired is deleted for all of them.
        """
        self.now = now
        self.store = store
        self.identity = ""
        self._metrics = metrics
        self.hooks: Hooks | None = None
        self._tenant_bytes = tenant_bytes
        self._uploading: Counter[str] = Counter()
        self._lists: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        # By tenant, the least recent first.
        self._known: dict[str, _Stored] = {}
        self._log_limit = LogLimit(_log)

    async def open(self) -> None:
        """Learn the identity of the store, unless it is known; `StoreError` if it does not answer."""
        if not self.identity:
            self.identity = await identity(self.store)

    async def get(self, tenant: str, file_id: str) -> FileRecord | None:
        """Return the record of a tenant's file, None if there is none or it has expired."""
        with self.answering():
            record = await self.find(tenant, file_id)
        return None if record is None or self._is_over(record) else record

    def _is_over(self, record: FileRecord) -> bool:
        return record.expires_at is not None and record.expires_at <= self.now()

    async def find(self, tenant: str, file_id: str) -> FileRecord | None:
        """Return the record of a tenant's file, also of one that has expired and still lies in the store."""
        if FILE_ID.fullmatch(file_id) is None:
            return None
        try:
            record = _decode(await self.store.read(_key(tenant, file_id, _RECORD)))
        except MissingObjectError:
            await self._check_present()
            return None
        except msgspec.MsgspecError as error:
            self._log_limit.warning(file_id, "the record of a file cannot be read: %s", error)
            return None
        return record if (record.tenant, record.id) == (tenant, file_id) else None

    async def page(
        self, tenant: str, limit: int, after: str | None, size: ReadSize, *, is_ascending: bool, purpose: str | None
    ) -> tuple[list[FileRecord], bool]:
        """Return up to `limit` files after the id `after`, and whether there are more; count the read in `size`."""
        if purpose not in (None, *get_args(Purpose)):
            return [], False
        with self.answering():
            names = [each.name for each in await self._stored(tenant)]
        size.num_names += len(names)
        ids = sorted((n.removesuffix(_RECORD) for n in names if n.endswith(_RECORD)), reverse=not is_ascending)
        if after is not None:
            ids = [each for each in ids if (each > after if is_ascending else each < after)]
        found: list[FileRecord] = []
        for start in range(0, len(ids), _CONCURRENT_READS):
            group = ids[start : start + _CONCURRENT_READS]
            size.num_records += len(group)
            records = await asyncio.gather(*(self.get(tenant, file_id) for file_id in group))
            found += [each for each in records if each is not None and purpose in (None, each.purpose)]
            if len(found) > limit:
                break
        return found[:limit], len(found) > limit

    @contextlib.asynccontextmanager
    async def room(self, tenant: str, num_bytes: int) -> AsyncIterator[None]:
        """Keep room for an upload of up to `num_bytes` while it lasts; `ApiError` 400, 507 or 503 if there is none."""
        with self.answering():
            await self.store.check_room(num_bytes)
            if not self._is_known_to_fit(tenant, num_bytes):
                stored = await self._stored(tenant)
                num_files, used = sum(each.name.endswith(_RECORD) for each in stored), _size(stored)
                self._check_quota(num_files + 1, used + self._uploading[tenant], num_bytes)
        with counted(self._uploading, tenant, num_bytes):
            yield

    def _is_known_to_fit(self, tenant: str, num_bytes: int) -> bool:
        """Whether an upload fits beside what the last one found a moment ago; `check_stored` looks again."""
        known = self._known.get(tenant)
        if known is None or time.monotonic() - known.at > _KNOWN_S:
            return False
        used = known.num_bytes + self._uploading[tenant] + num_bytes
        return known.num_files < MAX_FILES and used <= self._tenant_bytes

    def _check_quota(self, num_files: int, used: int, num_bytes: int) -> None:
        if num_files > MAX_FILES:
            message = f"This tenant has {MAX_FILES} files, which is the most that are kept. Delete some."
            raise ApiError(400, message, param="file", code="file_quota_exceeded")
        if used + num_bytes > self._tenant_bytes:
            message = (
                f"The files of this tenant may have {self._tenant_bytes} bytes together. They have {used}, and this "
                f"one has up to {num_bytes}. Delete files, or ask the operator for more (--files-tenant-bytes)."
            )
            raise ApiError(400, message, param="file", code="file_quota_exceeded")

    async def _stored(self, tenant: str) -> list[StoredObject]:
        """List the files of a tenant; one list at a time, as each may have twenty thousand names."""
        async with self._lists.setdefault(tenant, asyncio.Lock()):
            return await self.store.objects(_folder(tenant))

    async def check_stored(self, tenant: str, file_id: str) -> None:
        """Check that a file, whose bytes are stored and which has no record yet, fits; delete it and raise otherwise.

        Uploads at other gateways may have ended since `room` looked: the last one sees all. `ApiError` 400 beyond the
        quota, `StoreError` if the store cannot be read.
        """
        stored = await self._stored(tenant)
        sizes = {each.name: each.num_bytes for each in stored}
        own = sizes.get(file_id + _DATA, 0)
        try:
            self._check_quota(sum(name.endswith(_DATA) for name in sizes), _size(stored) - own, own)
        except ApiError:
            await self.store.delete(_key(tenant, file_id, _DATA))
            raise
        self._known.pop(tenant, None)
        if len(self._known) >= _MAX_KNOWN:
            del self._known[next(iter(self._known))]
        self._known[tenant] = _Stored(time.monotonic(), sum(name.endswith(_DATA) for name in sizes), _size(stored))

    async def write(self, tenant: str, file_id: str, pieces: AsyncIterator[bytes]) -> tuple[int, str]:
        """Store the bytes of a file; return their number and digest. It exists once its record is published."""
        digest, num_bytes = hashlib.sha256(), 0
        await self._check_present()
        writer = await self.store.writer(_key(tenant, file_id, _DATA))
        try:
            async for piece in pieces:
                digest.update(piece)
                num_bytes += len(piece)
                await writer.write(piece)
            await writer.commit()
        finally:
            await writer.abort()
        return num_bytes, digest.hexdigest()

    async def publish(self, record: FileRecord) -> None:
        """Make a file exist whose bytes are stored."""
        await self.write_part(_key(record.tenant, record.id, _RECORD), msgspec.json.encode(record))

    async def write_part(self, key: str, data: bytes) -> None:
        """Store a small object whole."""
        await self._check_present()
        await put(self.store, key, data)

    async def read(self, record: FileRecord, start: int, num_bytes: int) -> bytes:
        """Return bytes of a file, fewer only at its end; `StoreError` if it is shorter than its record says."""
        wanted = max(0, min(num_bytes, record.num_bytes - start))
        data = await self.read_part(_key(record.tenant, record.id, _DATA), start, wanted)
        if len(data) != wanted:
            raise StoreError(f"file {record.id} is damaged: it ends after {start + len(data)} bytes")
        return data

    async def read_whole(self, tenant: str, file_id: str, admit: Callable[[int], None]) -> bytes | None:
        """Return the bytes of a tenant's file, None if there is none.

        `admit` is called with their number first, and raises an error where that is too much. `ApiError` 503 if the
        store fails.
        """
        record = await self.get(tenant, file_id)
        if record is None:
            return None
        admit(record.num_bytes)
        try:
            with self.answering():
                return await self.read(record, 0, record.num_bytes)
        except MissingObjectError:
            return None

    async def read_part(self, key: str, start: int, num_bytes: int) -> bytes:
        """Return bytes of an object; `MissingObjectError` if there is none."""
        try:
            return await self.store.read(key, start, num_bytes)
        except MissingObjectError:
            await self._check_present()
            raise

    async def _check_present(self) -> None:
        """Raise `StoreError` unless the store is the one that was opened: a directory that is not mounted is empty."""
        await self.open()
        if await known_identity(self.store) != self.identity:
            raise StoreError(f"{self.store.place} is another one than before: is it mounted?")

    async def delete(self, tenant: str, file_id: str) -> None:
        """Delete a file."""
        with self.answering():
            await self.store.delete(_key(tenant, file_id, _RECORD))
            await self.store.delete(_key(tenant, file_id, _DATA))

    async def sweep(self) -> None:
        """Delete files that have expired, and bytes whose upload was never completed."""
        try:
            for folder in await self.store.folders():
                with contextlib.suppress(InvalidNameError):
                    await self._sweep(decode_name(folder))
        except (StoreError, ApiError) as error:
            self._log_limit.warning("sweep", "expired files were not deleted: %s", error)

    async def _sweep(self, tenant: str) -> None:
        found = await self.store.objects(_folder(tenant))
        records = {each.name.removesuffix(_RECORD) for each in found if each.name.endswith(_RECORD)}
        for name, _, modified in found:
            file_id, is_data = name.removesuffix(_DATA), name.endswith(_DATA)
            if is_data and file_id not in records and modified < self.now() - _ORPHAN_S:
                await self.delete(tenant, file_id)
        for file_id in records:
            record = await self.find(tenant, file_id)
            # One that cannot be read may be of a later version.
            if record is not None and self._is_over(record):
                is_used = self.hooks is not None and await self.hooks.user_of(tenant, file_id, ReadSize()) is not None
                if not is_used:
                    await self.delete(tenant, file_id)

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        """Turn failures of the store into `ApiError`s: 507 for a full one, 503 for others."""
        try:
            yield
        except MissingObjectError:
            raise
        except StoreError as error:
            self.note_failure(error)
            if isinstance(error, StoreFullError):
                message = "The server's store of files is full. Ask the operator to make room."
                raise ApiError(507, message, code="file_store_full") from error
            message = "The server's store of files cannot be used at the moment. Try again shortly."
            raise ApiError(503, message, code="file_store_unavailable", retry_after_s=5.0) from error

    def note_failure(self, error: StoreError) -> None:
        """Count a failure of the store, and tell the operator."""
        self._metrics.file_store_failures += 1
        self._log_limit.warning("store", "the store of files failed: %s", error)

    async def sweep_forever(self) -> None:
        """Sweep from time to time."""
        while True:
            await self.sweep()
            await asyncio.sleep(SWEEP_INTERVAL_S)


def _size(stored: list[StoredObject]) -> int:
    return sum(each.num_bytes for each in stored)


def _folder(tenant: str) -> str:
    return f"{encode_name(tenant)}/files"


def _key(tenant: str, file_id: str, suffix: str) -> str:
    return f"{_folder(tenant)}/{file_id}{suffix}"
