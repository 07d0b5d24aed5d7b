"""What a lane's tenants were served elsewhere, as far as it counts here, and this worker's report of its own service.

Workers tell one another the virtual tokens that they have charged. What others charge is added to a tenant's counter
here, so a tenant that has a worker for itself does not get half of the next one, too. Lifts stay with each worker: they
are maxima, and cannot be summed up. Others' word is bounded. It lets a counter grow by `SHARE` of what the lowest of
those that wait has grown by meanwhile, so whatever they say, every tenant goes on being served; and it puts no tenant
further than `MAX_AHEAD` behind those that wait.

A worker that starts has no counters. It takes over how far each tenant was ahead at other workers, or at one that has
died. That fades by what it has served since.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from msgspec import Struct

from gpu_worker.core.clients import Clients
from shared.services import MAX_AHEAD, MAX_TENANTS, TenantService

SHARE = 0.875
_MAX_TENANTS_KEPT = 4096


class HeardServices(Struct, frozen=True):
    """What others have told since the last time, of one lane.

    Attributes:
        served: Virtual tokens by tenant.
        ahead: By tenant, how far its counter was above the lowest of those that waited.
    """

    served: Mapping[str, float] = {}
    ahead: Mapping[str, float] = {}


class FleetService:
    """Of one lane. `VirtualCounters` asks it, and alone writes counters."""

    def __init__(self) -> None:
        # Those served last come last.
        self._served: dict[str, float] = {}
        self._total = 0.0
        self._told: dict[str, float] = {}
        # By tenant of whom others have told last: the lowest counter of the others that waited then.
        self._lowest: dict[str, float] = {}
        self._ahead: dict[str, float] = {}

    def charge(self, tenant: str, cost: float) -> None:
        """Add the cost of service by this worker."""
        self._served[tenant] = self._served.pop(tenant, 0.0) + cost
        if len(self._served) > _MAX_TENANTS_KEPT:
            del self._served[next(iter(self._served))]
        self._total += cost

    def offset(self, tenant: str) -> float:
        """Return how far a tenant is still ahead of others by what it was served before this worker started."""
        ahead = self._ahead.get(tenant)
        return 0.0 if ahead is None else max(0.0, ahead - self._total)

    def adopt(self, tenant: str, ahead: float) -> float:
        """Take over how far a tenant was ahead elsewhere; return by how much that is more than is known."""
        before = self.offset(tenant)
        if ahead > self._ahead.get(tenant, 0.0) and (tenant in self._ahead or len(self._ahead) < _MAX_TENANTS_KEPT):
            self._ahead[tenant] = min(ahead, MAX_AHEAD)
        return self.offset(tenant) - before

    def hear(self, served: Mapping[str, float]) -> None:
        """Note what tenants were served elsewhere."""
        for tenant, tokens in served.items():
            if tenant in self._told or len(self._told) < _MAX_TENANTS_KEPT:
                self._told[tenant] = min(MAX_AHEAD, self._told.get(tenant, 0.0) + tokens)

    def take_told(self, tenants: Clients) -> None:
        """Add what others have told since the last time to the counters of tenants."""
        if not self._told:
            return
        told, self._told = self._told, {}
        before, self._lowest = self._lowest, {tenant: tenants.lowest(besides=tenant) for tenant in told}
        for tenant, lowest in self._lowest.items():
            account, grown = tenants.accounts.get(tenant), lowest - before.get(tenant, lowest)
            # A tenant that waits alone delays no other.
            if account is not None and lowest < math.inf:
                more = min(told[tenant], SHARE * grown, lowest + MAX_AHEAD - account.counter)
                account.counter += max(0.0, more)

    def services(self, tenants: Clients) -> list[TenantService]:
        """Return what to tell others."""
        adopted = [tenant for tenant in self._ahead if self.offset(tenant)]
        names = dict.fromkeys([*list(reversed(self._served))[:MAX_TENANTS], *tenants.waiting, *adopted])
        lowest = tenants.lowest()
        told = []
        for name in list(names)[:MAX_TENANTS]:
            account, ahead = tenants.accounts.get(name), self.offset(name)
            if account is not None and lowest < math.inf:
                ahead = min(MAX_AHEAD, max(0.0, account.counter - lowest))
            told.append(TenantService(name, self._served.get(name, 0.0), ahead))
        return told
