"""The right to drive a batch: only the gateway that holds the lease may replace its record, until another takes over.

The driver renews the record before others take it for dead. What anyone but the driver changes is the wish to cancel.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import msgspec

from gateway.batches.log import ERRORS, BatchLog, ReplacedError, Stored
from gateway.batches.record import BatchRecord

RENEW_S = 2.0
_RETRY_S = 0.5


class LostLeaseError(Exception):
    """Another gateway drives the batch now, or it has ended."""


class Lease:
    """The lease of a batch, and its record as the driver knows it; changes count once they are saved."""

    def __init__(self, log: BatchLog, stored: Stored) -> None:
        self._log = log
        self._saving = asyncio.Lock()
        self.record = stored.record
        self.revision = stored.revision

    @classmethod
    async def take(cls, log: BatchLog, stored: Stored, owner: str) -> Lease | None:
        """Take over the batch of this record; None if another gateway was faster."""
        record = msgspec.structs.replace(stored.record, owner=owner, epoch=stored.record.epoch + 1)
        record.saves += 1
        try:
            return cls(log, Stored(record, await log.put(record, stored.revision)))
        except ReplacedError:
            return None

    @property
    def is_cancelled(self) -> bool:
        """Whether it is being cancelled."""
        return self.record.status == "cancelling"

    async def save(self) -> None:
        """Store the record, again until NATS answers; raise `LostLeaseError` if the batch is another gateway's."""
        async with self._saving:
            self.record.saves += 1
            while True:
                try:
                    self.revision = await self._log.put(self.record, self.revision)
                    return
                except ReplacedError:
                    if await self._adopt():
                        return
                except ERRORS:
                    await asyncio.sleep(_RETRY_S)

    async def _adopt(self) -> bool:
        """Take over what another gateway has changed; return whether our own write had been stored before."""
        found = await self._found()
        if found is None or (found.record.owner, found.record.epoch) != (self.record.owner, self.record.epoch):
            raise LostLeaseError
        self.revision = found.revision
        if found.record.status == "cancelling" and not self.is_cancelled:
            self.record.status, self.record.ends_as = "cancelling", "cancelled"
            self.record.times = {**self.record.times, **found.record.times}
        return found.record.saves >= self.record.saves

    async def _found(self) -> Stored | None:
        while True:
            try:
                return await self._log.active(self.record.tenant, self.record.id)
            except ERRORS:
                await asyncio.sleep(_RETRY_S)

    @contextlib.asynccontextmanager
    async def renewed(self) -> AsyncIterator[None]:
        """Renew the lease until the block ends. A lost lease interrupts it with `LostLeaseError`."""

        async def renew_forever() -> None:
            while True:
                await asyncio.sleep(RENEW_S)
                await self.save()

        async with asyncio.TaskGroup() as group:
            renewing = group.create_task(renew_forever())
            try:
                yield
            finally:
                renewing.cancel()

    async def release(self) -> None:
        """Release the batch to the first gateway that looks for one."""
        self.record.owner = ""
        with contextlib.suppress(LostLeaseError, ReplacedError, *ERRORS):
            self.revision = await self._log.put(self.record, self.revision)


def cancelled(record: BatchRecord, now: float) -> BatchRecord:
    """Return the record of a batch that is to end."""
    record = msgspec.structs.replace(record, ends_as="cancelled")
    record.enter("cancelling", now)
    return record
