"""The records of batches in NATS, stream `HR_BATCHES`: those that run, and those that have ended.

`hr.batch.active.<tenant>.<id>` is replaced by compare-and-set, which is the fence between drivers. The last record of a
batch is written to `hr.batch.ended.<tenant>.<id>` first, which counts from then on; then the active one is deleted.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import NamedTuple
from weakref import WeakValueDictionary

import msgspec
from nats.js.api import RawStreamMsg
from nats.js.errors import APIError, NotFoundError

from gateway.admission.stored_reads import ReadSize
from gateway.batches.record import BatchRecord, decode_batch
from shared.direct_client import DirectClient
from shared.errors import HeadraceError, InvalidNameError
from shared.nats_connection import SEND_ERRORS
from shared.publication import last_message, publish_expecting
from shared.streams import BATCHES_STREAM, StreamLimits
from shared.subjects import BATCH_ID, batch_subject, batches_filter, decode_name

# Of one tenant, an eighth of the stream; beyond either, the records of its oldest ended batches are dropped.
MAX_ENDED = 10_000
MAX_ENDED_BYTES = StreamLimits().batches_max_bytes // 8
# Metadata and errors take at most about 26 kB, so this many records always fit within the limit.
_FEW = 128
_TIMEOUT_S = 5.0
_CONCURRENT_READS = 16
ERRORS: tuple[type[Exception], ...] = (APIError, *SEND_ERRORS)


class ReplacedError(HeadraceError):
    """Somebody else has replaced the record meanwhile."""


class Stored(NamedTuple):
    """A record, and the number of its message."""

    record: BatchRecord
    revision: int


class BatchLog:
    """Reads and writes records. Keeps nothing but the sizes of those of tenants that have many.

    All methods raise NATS's errors if it does not answer (`ERRORS`).
    """

    def __init__(self, nats: DirectClient) -> None:
        self._js = nats.jetstream(timeout=_TIMEOUT_S)
        self._sizes: dict[str, dict[str, int]] = {}
        self._bounding: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def get(self, tenant: str, batch_id: str) -> BatchRecord | None:
        """Return a batch of a tenant; None if there is none."""
        found = await self.ended(tenant, batch_id) or await self.active(tenant, batch_id)
        # It may have ended between the two reads.
        found = found or await self.ended(tenant, batch_id)
        return None if found is None else found.record

    async def ended(self, tenant: str, batch_id: str) -> Stored | None:
        """Return a batch that has ended."""
        return await self._read("ended", tenant, batch_id)

    async def active(self, tenant: str, batch_id: str) -> Stored | None:
        """Return a batch that runs."""
        return await self._read("active", tenant, batch_id)

    async def read_active(self, names: Sequence[tuple[str, str]]) -> AsyncIterator[list[Stored]]:
        """Yield those of these batches, by tenant and id, that run: the answers to one group of reads after another."""
        for start in range(0, len(names), _CONCURRENT_READS):
            found = await asyncio.gather(*(self.active(*each) for each in names[start : start + _CONCURRENT_READS]))
            yield [stored for stored in found if stored is not None]

    async def _read(self, state: str, tenant: str, batch_id: str) -> Stored | None:
        if BATCH_ID.fullmatch(batch_id) is None:
            return None
        message = await self._message(state, tenant, batch_id)
        if message is None:
            return None
        try:
            record = decode_batch(message.data or b"")
        except msgspec.MsgspecError:
            return None
        is_meant = (record.tenant, record.id) == (tenant, batch_id)
        return Stored(record, message.seq or 0) if is_meant else None

    async def _message(self, state: str, tenant: str, batch_id: str) -> RawStreamMsg | None:
        return await last_message(self._js, BATCHES_STREAM, batch_subject(state, tenant, batch_id))

    async def put(self, record: BatchRecord, revision: int) -> int:
        """Replace an active record if its last revision is `revision`, 0 for none; else raise `ReplacedError`."""
        subject = batch_subject("active", record.tenant, record.id)
        stored = await publish_expecting(self._js, subject, msgspec.msgpack.encode(record), revision)
        if stored is None:
            raise ReplacedError(f"batch {record.id} was changed by another gateway")
        return stored

    async def end(self, record: BatchRecord, revision: int) -> None:
        """Keep the record of a batch that has ended, and take it from those that run; may be repeated."""
        kept = msgspec.structs.replace(record, done=b"", owner="")
        await self._js.publish(batch_subject("ended", record.tenant, record.id), msgspec.msgpack.encode(kept))
        await self.drop(revision)

    async def drop(self, revision: int) -> None:
        """Delete a record by its number, if it is still there."""
        with contextlib.suppress(NotFoundError):
            await self._js.delete_msg(BATCHES_STREAM, revision)

    async def list_active(self, tenant: str | None = None) -> list[tuple[str, str]]:
        """Return tenant and id of every batch that runs, of one tenant or of all."""
        return await self._list("active", tenant)

    async def page(self, tenant: str, limit: int, after: str | None, size: ReadSize) -> tuple[list[BatchRecord], bool]:
        """Return up to `limit` batches of a tenant behind `after`, the newest first, and whether there are more.

        Names and records count in `size`.
        """
        both = [*await self._list("active", tenant), *await self._list("ended", tenant)]
        size.num_names += len(both)
        ids = sorted({batch_id for _, batch_id in both if after is None or batch_id < after}, reverse=True)
        page: list[BatchRecord] = []
        for start in range(0, min(limit, len(ids)), _CONCURRENT_READS):
            group = ids[start : min(limit, start + _CONCURRENT_READS)]
            size.num_records += len(group)
            found = await asyncio.gather(*(self.get(tenant, batch_id) for batch_id in group))
            page += [record for record in found if record is not None]
        return page, len(ids) > limit

    async def bound(self, tenant: str) -> None:
        """Drop the oldest records of a tenant that has too many, or too large ones."""
        ids = sorted((batch_id for _, batch_id in await self._list("ended", tenant)), reverse=True)
        if len(ids) <= _FEW:
            return
        async with self._bounding.setdefault(tenant, asyncio.Lock()):
            known = self._sizes.get(tenant, {})
            unknown = [batch_id for batch_id in ids if batch_id not in known]
            for start in range(0, len(unknown), _CONCURRENT_READS):
                group = unknown[start : start + _CONCURRENT_READS]
                sizes = await asyncio.gather(*(self._size(tenant, batch_id) for batch_id in group))
                known |= dict(zip(group, sizes, strict=True))
            self._sizes[tenant] = kept = dict[str, int]()
            num_bytes = 0
            for batch_id in ids:
                num_bytes += known[batch_id]
                if len(kept) < MAX_ENDED and num_bytes <= MAX_ENDED_BYTES:
                    kept[batch_id] = known[batch_id]
                elif (message := await self._message("ended", tenant, batch_id)) is not None:
                    await self.drop(message.seq or 0)

    async def _size(self, tenant: str, batch_id: str) -> int:
        message = await self._message("ended", tenant, batch_id)
        return 0 if message is None else len(message.data or b"")

    async def _list(self, state: str, tenant: str | None) -> list[tuple[str, str]]:
        info = await self._js.stream_info(BATCHES_STREAM, subjects_filter=batches_filter(state, tenant))
        found = []
        for subject in info.state.subjects or {}:
            *_, owner, encoded = subject.split(".")
            try:
                found.append((decode_name(owner), decode_name(encoded)))
            except InvalidNameError:
                continue
        return found
