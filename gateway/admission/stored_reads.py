"""Reads of what gateways store: responses, resumable streams, files and batches. They count by their size.

Each tenant has a few at a time of each kind of store, so that a slow store does not delay reads of the others. A
request of 100 bytes can read 16 MB or ten thousand records, and its size counts when it has been read. So the limit of
its key is asked in the tenant's turn: those whose size does not count yet are as few as read at once.

A download of a file counts as one read, whatever its size, and its turn ends before the content is sent: 200 MB must
fit within a key's limit. The number of a tenant's downloads is bounded instead (`gateway.files.endpoint`).
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Literal
from weakref import WeakValueDictionary

from gateway.admission.auth import Principal
from gateway.admission.limits import READ_BYTES, READ_RECORDS, RateLimiter

_NAMES_A_RECORD = 64
"""Names that are listed in about the time in which one record is read."""
CONCURRENT_READERS = 4
"""Requests of one tenant that read from one kind of store at once."""
CONCURRENT_RESUMPTIONS = 64
"""Those that resume a stream: all clients of a gateway that has died come back at once, and most logs are short."""

StoreKind = Literal["responses", "streams", "resumptions", "files", "batches"]


@dataclass(slots=True)
class ReadSize:
    """What one request has read so far: bytes, or records and the names among which it has looked for them."""

    num_bytes: int = 0
    num_records: int = 0
    num_names: int = 0

    @property
    def num_reads(self) -> int:
        """The number of reads that it counts as."""
        num_records = self.num_records + self.num_names // _NAMES_A_RECORD
        return max(1 + num_records // READ_RECORDS, math.ceil(self.num_bytes / READ_BYTES))


class StoredReads:
    """Lets tenants read in turns. One per process."""

    def __init__(self, limiter: RateLimiter | None = None) -> None:
        """Count against the limits of `limiter`, if given."""
        self._limiter = limiter
        self._readers: WeakValueDictionary[tuple[str, StoreKind], asyncio.Semaphore] = WeakValueDictionary()

    @contextlib.asynccontextmanager
    async def turn(self, principal: Principal, kind: StoreKind) -> AsyncIterator[ReadSize]:
        """Wait for a turn of the tenant at a kind of store, and count the size that the block has noted.

        Raises:
            ApiError: 429; the key has read enough for now.
        """
        num_places = CONCURRENT_RESUMPTIONS if kind == "resumptions" else CONCURRENT_READERS
        async with self._readers.setdefault((principal.tenant, kind), asyncio.Semaphore(num_places)):
            lease = None if self._limiter is None else await self._limiter.admit_read(principal)
            size = ReadSize()
            try:
                yield size
            finally:
                if lease is not None:
                    lease.release(size.num_reads)
