"""Which batches of other gateways the watch takes over. The records are in memory, and the time is the test's."""

from __future__ import annotations

import asyncio
import contextlib
from types import SimpleNamespace
from typing import Any

import nats.errors
import pytest

from gateway.batches import drivers
from gateway.batches.drivers import AWAY_S, SCAN_S, STALE_S, BatchDrivers
from gateway.batches.lease import RENEW_S
from gateway.batches.log import BatchLog, Stored
from gateway.batches.record import BatchRecord
from gateway.metrics import GatewayMetrics

BEGAN_AT = 1000.0
turn = asyncio.sleep


class Records(BatchLog):
    """Active records of batches that other gateways drive. Each read takes a while of the test's time.

    Attributes:
        ids: Of all batches.
        dead: Those whose driver renews nothing.
        is_away: NATS does not answer.
        refused: The batch about which NATS answers with errors alone.
        most_at_once: Reads that waited for their answers together.
    """

    def __init__(self, num_batches: int) -> None:
        self.now = BEGAN_AT
        self.ids = [f"batch_{number:032x}" for number in range(num_batches)]
        self.dead: set[str] = set()
        self.is_away = False
        self.refused = ""
        self.most_at_once = self._num_reading = 0

    async def list_active(self, tenant: str | None = None) -> list[tuple[str, str]]:
        if self.is_away:
            raise nats.errors.TimeoutError
        return [("t", batch_id) for batch_id in self.ids]

    async def active(self, tenant: str, batch_id: str) -> Stored | None:
        self._num_reading += 1
        self.most_at_once = max(self.most_at_once, self._num_reading)
        self.now += 0.002
        await turn(0)
        self._num_reading -= 1
        revision = 1 if batch_id in self.dead else int(self.now / RENEW_S)
        record = BatchRecord(
            id=batch_id, tenant="t", endpoint="/v1/completions", input_file_id="file", completion_window="24h",
            created_at=0, expires_at=0, store="s", owner="another",
        )  # fmt: skip
        return Stored(record, revision)

    async def ended(self, tenant: str, batch_id: str) -> Stored | None:
        if batch_id == self.refused:
            raise nats.errors.TimeoutError
        return None


class Watch:
    """The drivers of a gateway that has no batch of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, num_batches: int) -> None:
        self.records = Records(num_batches)
        self.taken: dict[str, float] = {}
        self._ends_at = BEGAN_AT
        monkeypatch.setattr(drivers, "time", SimpleNamespace(monotonic=lambda: self.records.now))
        monkeypatch.setattr(asyncio, "sleep", self._sleep)
        services: Any = SimpleNamespace(log=self.records, catalog=SimpleNamespace(identity="s", open=self._open))
        self._drivers = BatchDrivers(services, GatewayMetrics(), "g")
        monkeypatch.setattr(self._drivers, "take", self._take)

    async def _open(self) -> None:
        pass

    async def _take(self, stored: Stored) -> None:
        self.taken.setdefault(stored.record.id, self.records.now - BEGAN_AT)

    async def _sleep(self, seconds: float) -> None:
        self.records.now += seconds
        if self.records.now >= self._ends_at:
            raise asyncio.CancelledError

    async def run(self, seconds: float) -> None:
        self._ends_at = self.records.now + seconds
        with contextlib.suppress(asyncio.CancelledError):
            await self._drivers.watch_forever()


@pytest.mark.parametrize("num_batches", [1, 64, 1000])
async def test_batch_of_a_dead_gateway_is_taken_over_however_many_others_are_driven(
    monkeypatch: pytest.MonkeyPatch, num_batches: int
) -> None:
    watch = Watch(monkeypatch, num_batches)
    dead = watch.records.ids[0]
    watch.records.dead = {dead}
    await watch.run(60.0)
    assert list(watch.taken) == [dead]
    assert STALE_S <= watch.taken[dead] <= STALE_S + 2 * (SCAN_S + 0.002 * num_batches)
    assert min(num_batches, 2) <= watch.records.most_at_once <= 64


@pytest.mark.parametrize("is_nats_away", [True, False])
async def test_nothing_is_taken_over_for_time_in_which_nats_or_this_gateway_was_away(
    monkeypatch: pytest.MonkeyPatch, *, is_nats_away: bool
) -> None:
    watch = Watch(monkeypatch, 2)
    watch.records.dead = set(watch.records.ids)
    await watch.run(STALE_S - SCAN_S)
    watch.records.is_away = is_nats_away
    if is_nats_away:
        await watch.run(SCAN_S)
    else:
        watch.records.now += AWAY_S
    watch.records.is_away = False
    await watch.run(STALE_S - SCAN_S)
    assert watch.taken == {}
    await watch.run(STALE_S)
    assert len(watch.taken) == 2


async def test_batch_that_cannot_be_taken_over_keeps_no_other_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch(monkeypatch, 3)
    watch.records.dead = set(watch.records.ids)
    watch.records.refused = watch.records.ids[0]
    await watch.run(STALE_S + 2 * SCAN_S)
    assert list(watch.taken) == watch.records.ids[1:]
