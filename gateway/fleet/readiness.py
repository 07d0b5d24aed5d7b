"""Whether this gateway lives, and whether it could serve a request now."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from gateway.fleet.fleet_load import FleetLoad

Status = Literal["ready", "no_queue", "no_worker"]


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

    status: Status
    models: tuple[str, ...]

    @property
    def is_ready(self) -> bool:
        """Whether to send requests here."""
        return self.status == "ready"


def readiness(fleet: FleetView, queue: QueueConnection) -> Readiness:
    """Judge from the heartbeats: a worker is there when it is heard and its steps advance while it has work."""
    models = tuple(model for model in fleet.models() if fleet.is_ready(model))
    status: Status = "no_queue" if not queue.is_connected else "ready" if models else "no_worker"
    return Readiness(status, models)
