"""Whether this gateway lives, and whether it could serve a request now."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Protocol

from gateway.load import FleetLoad
from gateway.redis_client import RedisCache


class FleetView(Protocol):
    """What the routes need to know of the fleet."""

    def models(self) -> list[str]:
        """Return the models that live workers serve."""
        ...

    def is_ready(self, model: str | None = None) -> bool:
        """Whether a live worker takes new requests of a model, or of any."""
        ...

    def load(self, model: str) -> FleetLoad | None:
        """Return a model's load; None if it is unknown."""
        ...


class QueueConnection(Protocol):
    """What the routes need to know of the NATS connection."""

    @property
    def is_connected(self) -> bool:
        """Whether the connection is up."""
        ...


@dataclass(frozen=True, slots=True)
class Readiness:
    """Whether a request could be served now, and if not, why.

    Attributes:
        status: `ready`, `no_queue` (NATS is away) or `no_worker` (none has made progress lately).
    """

    status: str
    models: tuple[str, ...]

    @property
    def is_ready(self) -> bool:
        """Whether to send requests here."""
        return self.status == "ready"


def readiness(fleet: FleetView, queue: QueueConnection) -> Readiness:
    """Judge from the heartbeats: a worker is there when it is heard and its steps advance while it has work."""
    models = tuple(model for model in fleet.models() if fleet.is_ready(model))
    status = "no_queue" if not queue.is_connected else "ready" if models else "no_worker"
    return Readiness(status, models)


def detail(fleet: FleetView, queue: QueueConnection, redis: RedisCache | None) -> dict[str, Any]:
    """Return everything a person who looks after the system wants to see at a glance."""
    loads = [load for model in fleet.models() if (load := fleet.load(model)) is not None]
    return {
        "status": readiness(fleet, queue).status,
        "nats": "connected" if queue.is_connected else "away",
        "redis": "none" if redis is None else "connected" if redis.is_available else "away",
        "models": {load.model: asdict(load) for load in loads},
    }
