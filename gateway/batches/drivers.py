"""The batches that this gateway drives, and the watch for batches without a driver.

A batch whose record stays the same for `STALE_S` has no driver any more: a living one renews it every `RENEW_S`. The
watch goes by this gateway's own clock alone, and forgets what it has seen when NATS or this gateway was away: when one
step of a scan has taken longer than `AWAY_S`. A scan of many batches has many steps.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter

from gateway.batches.driver import BatchDriver
from gateway.batches.driver_services import DriverServices
from gateway.batches.lease import Lease, LostLeaseError
from gateway.batches.log import ERRORS, Stored
from gateway.batches.record import BatchError
from gateway.metrics import GatewayMetrics
from shared.background_tasks import BackgroundTasks
from shared.log_limit import LogLimit
from shared.objects.store import StoreError

SCAN_S = 1.5
STALE_S = 4.5
AWAY_S = 3.0
# Driven by one gateway process at once, in all and of one tenant; further ones wait for another gateway, or for an end.
MAX_DRIVEN = 64
MAX_OF_TENANT = 8
_MAX_CRASHES = 3
_INTERNAL = BatchError("internal_error", "The gateway failed to compute this batch. The failure was logged.")

_log = logging.getLogger(__name__)


class BatchDrivers:
    """Drives batches. Run `watch_forever()` beside it."""

    def __init__(self, services: DriverServices, metrics: GatewayMetrics, gateway: str) -> None:
        self._services = services
        self._metrics = metrics
        self._gateway = gateway
        self._driven: dict[str, tuple[BatchDriver, asyncio.Task[None]]] = {}
        self._crashes: Counter[str] = Counter()
        self._seen: dict[str, tuple[int, float]] = {}
        self._stepped_at = 0.0
        self._tasks = BackgroundTasks()
        self._log_limit = LogLimit(_log)

    async def take(self, stored: Stored) -> None:
        """Drive a batch, unless another gateway was faster or this one drives enough."""
        batch_id = stored.record.id
        own = sum(driver.tenant == stored.record.tenant for driver, _ in self._driven.values())
        if batch_id in self._driven or len(self._driven) >= MAX_DRIVEN or own >= MAX_OF_TENANT:
            return
        lease = await Lease.take(self._services.log, stored, self._gateway)
        if lease is None or batch_id in self._driven:
            return
        driver = BatchDriver(self._services, lease)
        task = self._tasks.spawn(self._drive(batch_id, driver), f"batch {batch_id}")
        self._driven[batch_id] = (driver, task)
        self._count()
        extra = {"batch": batch_id, "tenant": stored.record.tenant, "epoch": lease.record.epoch}
        _log.info("driving a batch", extra=extra)

    async def _drive(self, batch_id: str, driver: BatchDriver) -> None:
        try:
            if self._crashes[batch_id] >= _MAX_CRASHES:
                await driver.fail(_INTERNAL)
            await driver.run()
            self._crashes.pop(batch_id, None)
        except LostLeaseError:
            pass
        except Exception:
            self._crashes[batch_id] += 1
            _log.exception("a batch could not be driven", extra={"batch": batch_id})
        finally:
            self._driven.pop(batch_id, None)
            self._count()

    def _count(self) -> None:
        self._metrics.batches_driven = len(self._driven)

    async def watch_forever(self) -> None:
        """Take over batches without a driver."""
        while True:
            try:
                await self._scan()
            except ERRORS as error:
                # Drivers could not renew their leases either.
                self._seen.clear()
                self._log_limit.warning("scan", "batches without a driver are not looked for: %r", error)
            await asyncio.sleep(SCAN_S)

    async def _scan(self) -> None:
        self._step()
        try:
            await self._services.catalog.open()
        except StoreError as error:
            self._services.catalog.note_failure(error)
            return
        self._step()
        others = [each for each in await self._services.log.list_active() if each[1] not in self._driven]
        self._step()
        async for group in self._services.log.read_active(others):
            now = self._step()
            own = [stored for stored in group if self._has_files_of(stored)]
            silent = {stored.revision for stored in own if self._is_silent(stored, now)}
            for stored in own:
                if stored.revision in silent or not stored.record.owner:
                    await self._take_over(stored, is_silent=stored.revision in silent)
                    self._step()
        ids = {batch_id for _, batch_id in others}
        self._seen = {batch_id: seen for batch_id, seen in self._seen.items() if batch_id in ids}

    def _step(self) -> float:
        """End a step of a scan, and return the time; forget the earlier looks if it has taken too long."""
        now = time.monotonic()
        if now - self._stepped_at > AWAY_S:
            self._seen.clear()
        self._stepped_at = now
        return now

    def _is_silent(self, stored: Stored, now: float) -> bool:
        revision, since = self._seen.setdefault(stored.record.id, (stored.revision, now))
        if revision != stored.revision:
            self._seen[stored.record.id] = (stored.revision, now)
            return False
        return now - since >= STALE_S

    async def _take_over(self, stored: Stored, *, is_silent: bool) -> None:
        record = stored.record
        try:
            if await self._services.log.ended(record.tenant, record.id) is not None:
                await self._services.log.drop(stored.revision)
                return
            self._metrics.batches_taken_over += is_silent
            await self.take(stored)
        except ERRORS as error:
            self._log_limit.warning("take", "batch %s is not taken over: %r", record.id, error)

    def _has_files_of(self, stored: Stored) -> bool:
        record, own = stored.record, self._services.catalog
        if record.store == own.identity:
            return True
        told = "batch %s has its files in another store than %s: give all gateways the same --files"
        self._log_limit.warning("other store", told, record.id, own.store.place)
        return False

    async def close(self) -> None:
        """Stop driving, and leave the batches to other gateways."""
        driven = list(self._driven.values())
        for _, task in driven:
            task.cancel()
        await asyncio.gather(*(task for _, task in driven), return_exceptions=True)
        await asyncio.gather(*(driver.release() for driver, _ in driven))
