"""The last service counts of tenants that workers have reported: a worker that starts takes them over.

Live workers report their own. The gateways' heartbeats carry those of silent workers, up to `MAX_BYTES`: all workers
and gateways read them once a second, and any process with a worker's login can invent models.
"""

from __future__ import annotations

from collections.abc import Iterable

from shared.messages import Heartbeat
from shared.services import MAX_MODELS, MAX_TENANTS, Services, TenantService

SILENT_S = 1.0
MEMORY_S = 60.0
MAX_BYTES = 32_000
"""Encoded size in a heartbeat: models have equal shares of it, and the lanes of a model equal parts of its share."""
_MAX_WORKERS = 1024
# Of the encoding of a tenant, and of a model, beside its name.
_TENANT_BYTES = 21
_MODEL_BYTES = 32


class LastServices:
    """Owns the last reports, by model, worker and the time of its start. `now` is loop time."""

    def __init__(self) -> None:
        # In the order of their last heartbeats.
        self._told: dict[tuple[str, str, float], tuple[Services, float]] = {}
        # When a request of a model waited last.
        self._asked: dict[str, float] = {}

    def note(self, heartbeat: Heartbeat, now: float) -> None:
        """Take note of a worker's heartbeat."""
        place = heartbeat.model, heartbeat.worker, heartbeat.started
        self._told.pop(place, None)
        if heartbeat.services:
            self._told[place] = heartbeat.services, now
        while len(self._told) > _MAX_WORKERS:
            del self._told[next(iter(self._told))]

    def of_silent(self, now: float, asked: Iterable[str], served: Iterable[str]) -> dict[str, Services]:
        """Return by model how far tenants were ahead at workers that are silent now.

        Args:
            now: The time.
            asked: Models of which requests wait; they and those of the last minute come before others.
            served: Models that live workers serve. Models in neither are left out.
        """
        self._told = {place: told for place, told in self._told.items() if now - told[1] < MEMORY_S}
        silent: dict[str, list[Services]] = {}
        for (model, _, _), (services, told_at) in self._told.items():
            if now - told_at > SILENT_S:
                silent.setdefault(model, []).append(services)
        told_of = {model for model, _, _ in self._told}
        self._asked = {model: at for model, at in self._asked.items() if now - at < MEMORY_S and model in told_of}
        self._asked |= dict.fromkeys(told_of.intersection(asked), now)
        models = [model for model in dict.fromkeys((*self._asked, *served)) if model in silent][:MAX_MODELS]
        share = MAX_BYTES // max(1, len(models))
        return {model: _merged(silent[model], share - _MODEL_BYTES - len(model.encode())) for model in models}


def _merged(told: list[Services], num_bytes: int) -> Services:
    """Return each tenant's largest lead over the others, encoded in at most this many bytes."""
    lanes = dict.fromkeys(lane for services in told for lane in services)
    return {
        lane: _furthest([each for services in told for each in services.get(lane, ())], num_bytes // len(lanes))
        for lane in lanes
    }


def _furthest(told: list[TenantService], num_bytes: int) -> tuple[TenantService, ...]:
    """Return the tenants that were furthest ahead, in order, as far as the bytes go."""
    ahead: dict[str, float] = {}
    for service in told:
        ahead[service.tenant] = max(service.ahead, ahead.get(service.tenant, 0.0))
    found: list[TenantService] = []
    for tenant in sorted((tenant for tenant in ahead if ahead[tenant]), key=ahead.__getitem__, reverse=True):
        num_bytes -= _TENANT_BYTES + len(tenant.encode())
        if num_bytes < 0 or len(found) == MAX_TENANTS:
            break
        found.append(TenantService(tenant, 0.0, ahead[tenant]))
    return tuple(found)
