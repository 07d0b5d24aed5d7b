"""Reads usage from the ledger, a few reads at a time, and keeps what no longer changes.

Each tenant has one read at a time, and each process a few. A few more wait; beyond these, a request is refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from weakref import WeakValueDictionary

from nats.errors import Error as NatsError
from nats.js import JetStreamContext

from gateway.admission.auth import Principal
from gateway.admission.limits import READ_PERIODS, RateLimiter
from gateway.errors import ApiError
from shared.usage_ledger import HOUR_DIGITS, MEASURES, Measure, day_of, hour_of, read_hours, read_usage

MAX_READS = 8
# Pending reads of one tenant, of which one runs at a time, and of all tenants.
MAX_OF_TENANT = 8
MAX_OF_PROCESS = 128
_CONCURRENT_WALKS = 4
# For more hours than this, reading all hours of the tenant at once is cheaper than one read for each.
_FEW_HOURS = 8
# Counts of a period arrive late, after an outage much later: they are read again after this time.
_SETTLED_S = 300.0
_KEPT_S = 600.0
_MAX_KEPT = 16_384
_BUSY_S = 1.0

Counts = dict[tuple[str, str], dict[str, int]]
"""By model and lane, the total of each measure."""
_Key = tuple[str, str | None, tuple[Measure, ...]]
"""A tenant, a period and measures."""


class UsageReader:
    """Reads the ledger for the tenants of one process."""

    def __init__(self, js: JetStreamContext, limiter: RateLimiter, clock: Callable[[], float] = time.time) -> None:
        """Count reads against the limits of `limiter`; `clock` tells Unix seconds."""
        self._js = js
        self._limiter = limiter
        self._clock = clock
        self._in_hand: Counter[str] = Counter()
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._reads = asyncio.Semaphore(MAX_READS)
        # Until when each is kept, and what it holds, the oldest first.
        self._kept: OrderedDict[_Key, tuple[float, Counts]] = OrderedDict()
        self._num_kept = 0

    async def read(
        self, principal: Principal, periods: Sequence[str | None], measures: Sequence[Measure] = MEASURES
    ) -> list[Counts]:
        """Return what the tenant of a key has used in each period (see `read_usage`), which are days or hours alone.

        Raises:
            ApiError: 429, the tenant or key reads too much; 503, too many read, or NATS does not answer.
        """
        async with self._turn(principal.tenant):
            lease = await self._limiter.admit_read(principal)
            try:
                return await self._read(principal.tenant, periods, tuple(measures))
            except (NatsError, OSError) as error:
                message = "NATS, which keeps the usage, does not answer."
                raise ApiError(503, message, code="records_unavailable", retry_after_s=5.0) from error
            finally:
                lease.release(max(1, -(-len(periods) // READ_PERIODS)))

    @contextlib.asynccontextmanager
    async def _turn(self, tenant: str) -> AsyncIterator[None]:
        if self._in_hand[tenant] >= MAX_OF_TENANT:
            message = f"This gateway has {MAX_OF_TENANT} reads of usage of this tenant in hand. Try again in 1 s."
            raise ApiError(429, message, code="too_many_reads", retry_after_s=_BUSY_S)
        if self._in_hand.total() >= MAX_OF_PROCESS:
            message = f"This gateway has {MAX_OF_PROCESS} reads of usage in hand. Try again in 1 s."
            raise ApiError(503, message, code="too_many_reads", retry_after_s=_BUSY_S)
        self._in_hand[tenant] += 1
        try:
            async with self._turns.setdefault(tenant, asyncio.Lock()), self._reads:
                yield
        finally:
            # A tenant with none is forgotten.
            self._in_hand -= Counter((tenant,))

    async def _read(self, tenant: str, periods: Sequence[str | None], measures: tuple[Measure, ...]) -> list[Counts]:
        now, found = self._clock(), {}
        for period in periods:
            until, counts = self._kept.get((tenant, period, measures), (0.0, None))
            if counts is not None and now < until:
                found[period] = counts
        missing = [period for period in periods if period not in found]
        hours = [period for period in missing if period is not None and len(period) == HOUR_DIGITS]
        if len(hours) > _FEW_HOURS:
            found |= await self._walk_hours(tenant, hours, measures)
        else:
            for begin in range(0, len(missing), _CONCURRENT_WALKS):
                some = missing[begin : begin + _CONCURRENT_WALKS]
                walks = (self._walk(tenant, period, measures) for period in some)
                found |= zip(some, await asyncio.gather(*walks), strict=True)
        for period in missing:
            if period is not None and _is_settled(period, now):
                self._keep((tenant, period, measures), found[period], now + _KEPT_S)
        return [found[period] for period in periods]

    async def _walk(self, tenant: str, period: str | None, measures: tuple[Measure, ...]) -> Counts:
        counts: Counts = defaultdict(dict)
        async for each in read_usage(self._js, tenant=tenant, period=period, measures=measures):
            counts[each.model, each.lane][each.measure] = each.total
        return counts

    async def _walk_hours(
        self, tenant: str, hours: Sequence[str], measures: tuple[Measure, ...]
    ) -> dict[str | None, Counts]:
        found: dict[str | None, Counts] = {hour: defaultdict(dict) for hour in hours}
        async for hour, each in read_hours(self._js, tenant):
            if hour in found and each.measure in measures:
                found[hour][each.model, each.lane][each.measure] = each.total
        return found

    def _keep(self, key: _Key, counts: Counts, until: float) -> None:
        _, replaced = self._kept.pop(key, (0.0, None))
        self._num_kept += 1 + len(counts) - (0 if replaced is None else 1 + len(replaced))
        self._kept[key] = (until, counts)
        while self._num_kept > _MAX_KEPT:
            _, (_, oldest) = self._kept.popitem(last=False)
            self._num_kept -= 1 + len(oldest)


def _is_settled(period: str, now: float) -> bool:
    name_of = hour_of if len(period) == HOUR_DIGITS else day_of
    return period < name_of(now - _SETTLED_S)
