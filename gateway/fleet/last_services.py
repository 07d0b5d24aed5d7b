"""What workers have told last of the service that tenants have had: one that starts takes it over.

Workers that are heard tell it themselves. The gateways' heartbeats tell it for those that are silent.
"""

from __future__ import annotations

from shared.messages import Heartbeat
from shared.services import MAX_MODELS, MAX_TENANTS, Services, TenantService

SILENT_S = 1.0
MEMORY_S = 60.0
_MAX_WORKERS = 1024


class LastServices:
    """Owns what was told last, by model, worker and the time of its start. `now` is loop time."""

    def __init__(self) -> None:
        # Those heard last come last.
        self._told: dict[tuple[str, str, float], tuple[Services, float]] = {}

    def note(self, heartbeat: Heartbeat, now: float) -> None:
        """Take note of a worker's heartbeat."""
        place = heartbeat.model, heartbeat.worker, heartbeat.started
        self._told.pop(place, None)
        if heartbeat.services:
            self._told[place] = heartbeat.services, now
        while len(self._told) > _MAX_WORKERS:
            del self._told[next(iter(self._told))]

    def of_silent(self, now: float) -> dict[str, Services]:
        """Return by model how far tenants were ahead at workers that are silent now."""
        self._told = {place: told for place, told in self._told.items() if now - told[1] < MEMORY_S}
        found: dict[str, Services] = {}
        for (model, _, _), (services, told_at) in self._told.items():
            if now - told_at > SILENT_S and (model in found or len(found) < MAX_MODELS):
                found[model] = {
                    lane: _merged(found.get(model, {}).get(lane, ()), services.get(lane, ()))
                    for lane in found.get(model, {}).keys() | services.keys()
                }
        return found


def _merged(some: tuple[TenantService, ...], others: tuple[TenantService, ...]) -> tuple[TenantService, ...]:
    """Return how far each tenant was ahead where it was most, those first that were furthest."""
    ahead: dict[str, float] = {}
    for service in (*some, *others):
        ahead[service.tenant] = max(service.ahead, ahead.get(service.tenant, 0.0))
    first = sorted((tenant for tenant in ahead if ahead[tenant]), key=ahead.__getitem__, reverse=True)
    return tuple(TenantService(tenant, 0.0, ahead[tenant]) for tenant in first[:MAX_TENANTS])
