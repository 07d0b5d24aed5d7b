"""Whether this gateway could serve a request now, and how a gateway that starts waits until it knows the fleet."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Literal, Protocol

from nats.aio.client import Client
from nats.errors import Error as NatsError

from gateway.fleet.fleet_load import FleetLoad
from shared.errors import DependencyError

Status = Literal["ready", "no_queue", "no_worker"]


class FleetView(Protocol):
    """What the routes need to know of the fleet."""

    def models(self) -> list[str]:
        """Return the models that live workers serve."""
        ...

    def adapters(self) -> dict[str, str]:
        """Return the models of adapters, by the adapters' names."""
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


# Two heartbeats of a worker: within them every live worker is heard, the first one or the last.
FULL_ROUND_S = 0.5
# A fleet that is silent for longer has no workers, and requests are refused for that.
QUIET_FLEET_S = 1.0
_POLL_S = 0.02


async def wait_for_fleet(queue: Client, fleet: FleetView) -> None:
    """Wait until every live worker has been heard, or it is clear that there is none.

    Time is counted in turns of the event loop, so that a process that is starved meanwhile still reads what has come.

    Raises:
        DependencyError: NATS does not confirm our subscriptions.
    """
    try:
        await queue.flush()
    except NatsError as error:
        raise DependencyError(f"NATS does not confirm our subscriptions: {error!r}") from None
    for turn in range(round(QUIET_FLEET_S / _POLL_S)):
        if fleet.models() and turn * _POLL_S >= FULL_ROUND_S:
            return
        await asyncio.sleep(_POLL_S)
