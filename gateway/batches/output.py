"""The output of a batch: lines in the order in which they are answered, in parts until the batch has ended.

A part is one object for answers and one for errors, named after its driver's epoch and its own number. It counts once
the record names it, together with the lines in it: what a driver wrote that lost its lease is never read.
When the batch has ended, its parts become its files.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import TypeVar

from gateway.batches.lease import Lease
from gateway.batches.record import ENDED, KINDS, BatchError, BatchRecord, Kind, Part, with_done
from gateway.files.catalog import READ_BYTES, FileCatalog, ReadableFile
from gateway.files.objects import FileRecord
from gateway.files.upload import DEFAULT_EXPIRY_S
from shared.messages import Usage
from shared.objects.store import MissingObjectError, StoreError
from shared.subjects import encode_name

# Output that is written at once, and the time after which a smaller part is written; that grows with their number, so
# that a batch of a day has a few thousand.
_PART_BYTES = 1 << 20
_FLUSH_S = 1.0
_MAX_FLUSH_S = 30.0
_PARTS_PER_S = 32
_RETRY_S = 2.0

Result = TypeVar("Result")


async def patiently(catalog: FileCatalog, work: Callable[[], Awaitable[Result]]) -> Result:
    """Do work on the store, again while the store fails: it may be full. `MissingObjectError` is raised."""
    while True:
        try:
            return await work()
        except MissingObjectError:
            raise
        except StoreError as error:
            catalog.note_failure(error)
            await asyncio.sleep(_RETRY_S)


class BatchOutput:
    """Writes the output of one batch. Owns the lines that are not written yet."""

    def __init__(self, catalog: FileCatalog, lease: Lease, now: Callable[[], float] = time.monotonic) -> None:
        self._catalog = catalog
        self._lease = lease
        self._now = now
        self._number = 0
        self._flushed_at = now()
        self._begin()

    def _begin(self) -> None:
        self._lines: list[int] = []
        self._data: dict[Kind, bytearray] = {kind: bytearray() for kind in KINDS}
        self._num_failed = 0
        self._usage = Usage(0, 0)
        self._reasoning_tokens = 0

    def add(
        self, line: int, data: bytes, *, is_answer: bool, usage: Usage | None = None, reasoning_tokens: int = 0
    ) -> None:
        """Take the output of a line."""
        self._lines.append(line)
        self._num_failed += not is_answer
        self._data["output" if is_answer else "error"] += data + b"\n"
        if usage is not None:
            self._usage = _sum(self._usage, usage)
        self._reasoning_tokens += reasoning_tokens

    @property
    def is_due(self) -> bool:
        """Whether to write what there is."""
        if not self._lines:
            return False
        wait_s = min(_MAX_FLUSH_S, _FLUSH_S + len(self._lease.record.parts) / _PARTS_PER_S)
        return sum(map(len, self._data.values())) >= _PART_BYTES or self._now() - self._flushed_at >= wait_s

    async def flush(self, position: tuple[int, int] | None = None) -> None:
        """Write what there is, and note `position`, where undone lines may begin; may raise `LostLeaseError`."""
        record, lines, data = self._lease.record, self._lines, self._data
        num_failed, usage, reasoning_tokens = self._num_failed, self._usage, self._reasoning_tokens
        self._flushed_at = self._now()
        self._begin()
        if lines:
            self._number += 1
            part = Part(record.epoch, self._number, len(data["output"]), len(data["error"]))
            for kind in KINDS:
                if data[kind]:
                    await self._put(_part_key(record, part, kind), bytes(data[kind]))
            record.parts = [*record.parts, part]
            record.done = with_done(record.done, lines)
            record.completed += len(lines) - num_failed
            record.failed += num_failed
            record.usage = _sum(record.usage, usage)
            record.reasoning_tokens += reasoning_tokens
        if position is not None:
            record.position = position
        await self._lease.save()

    async def _put(self, key: str, data: bytes) -> None:
        await patiently(self._catalog, partial(self._catalog.write_part, key, data))

    async def finish(self, now: float) -> None:
        """Make files of the parts, and end the batch; may raise `LostLeaseError`."""
        record = self._lease.record
        try:
            for kind in KINDS:
                if record.num_bytes(kind):
                    await patiently(self._catalog, partial(self._write_file, kind, now))
        except MissingObjectError:
            record.errors = [BatchError("output_lost", "The output is no longer in the store of files.")]
            record.parts, record.ends_as = [], "failed"
        while record.status not in ENDED:
            record.enter(record.ends_as, now)
            await self._lease.save()

    async def _write_file(self, kind: Kind, now: float) -> None:
        record, catalog = self._lease.record, self._catalog
        file_id = record.file_id(kind)
        _, digest = await catalog.write(record.tenant, file_id, _pieces(catalog, record, kind))
        await catalog.publish(_file_record(record, kind, int(now), digest))


async def delete_parts(catalog: FileCatalog, record: BatchRecord) -> None:
    """Delete the parts of an ended batch, also those that no record names."""
    await catalog.store.delete_folder(_folder(record))


def growing_file(catalog: FileCatalog, record: BatchRecord, kind: Kind) -> ReadableFile | None:
    """Return the file of a batch that has not ended, as far as it is written; None before it has begun."""
    if not record.num_bytes(kind):
        return None

    async def read(start: int, num_bytes: int) -> bytes:
        return await _read(catalog, record, kind, start, num_bytes)

    return ReadableFile(_file_record(record, kind, record.created_at, ""), read)


async def _pieces(catalog: FileCatalog, record: BatchRecord, kind: Kind) -> AsyncIterator[bytes]:
    start = 0
    while data := await _read(catalog, record, kind, start, READ_BYTES):
        yield data
        start += len(data)


async def _read(catalog: FileCatalog, record: BatchRecord, kind: Kind, start: int, num_bytes: int) -> bytes:
    data, before = bytearray(), 0
    for part in record.parts:
        size = part.output_bytes if kind == "output" else part.error_bytes
        skipped = max(0, start - before)
        wanted = min(size - skipped, num_bytes - len(data))
        if wanted > 0:
            piece = await catalog.read_part(_part_key(record, part, kind), skipped, wanted)
            if len(piece) != wanted:
                raise StoreError(f"part {part.epoch}-{part.number} of batch {record.id} is damaged")
            data += piece
        before += size
        if len(data) >= num_bytes:
            break
    return bytes(data)


def _file_record(record: BatchRecord, kind: Kind, now: int, digest: str) -> FileRecord:
    return FileRecord(
        id=record.file_id(kind),
        tenant=record.tenant,
        filename=f"{record.id}_{kind}.jsonl",
        purpose="batch_output",
        num_bytes=record.num_bytes(kind),
        sha256=digest,
        created_at=now,
        expires_at=now + (record.output_expires_after_s or DEFAULT_EXPIRY_S),
        status="processed" if digest else "uploaded",
    )


def _folder(record: BatchRecord) -> str:
    return f"{encode_name(record.tenant)}/batches/{record.suffix}"


def _part_key(record: BatchRecord, part: Part, kind: Kind) -> str:
    return f"{_folder(record)}/{part.epoch:06d}-{part.number:06d}.{kind}"


def _sum(one: Usage, other: Usage) -> Usage:
    return Usage(
        one.prompt_tokens + other.prompt_tokens,
        one.completion_tokens + other.completion_tokens,
        one.cached_tokens + other.cached_tokens,
    )
