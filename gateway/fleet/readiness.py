"""Whether this gateway could serve a request now, and how a gateway that starts waits until it knows the fleet."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Literal

from nats.aio.client import Client
from nats.errors import Error as NatsError

from gateway.fleet.fleet import Fleet
from shared.errors import DependencyError

Status = Literal["ready", "no_queue", "no_worker"]


@dataclass(frozen=True, slots=True)
class Readiness:
    """Whether a request could be served now, and if not, why."""

    status: Status
    models: tuple[str, ...]

    @property
    def is_ready(self) -> bool:
        """Whether to send requests here."""
        return self.status == "ready"


def readiness(fleet: Fleet, *, is_connected: bool) -> Readiness:
    """Judge from the heartbeats: a worker is there when it is heard and its steps advance while it has work.

    A model that sleeps counts: requests wake it. One whose workers take no requests, as they are cordoned, does not.
    """
    coming = (name for name in fleet.hosted.names() if fleet.coming(name) is not None)
    models = tuple(sorted({*filter(fleet.is_ready, fleet.models()), *coming}))
    status: Status = "no_queue" if not is_connected else "ready" if models else "no_worker"
    return Readiness(status, models)


# Two heartbeats of a worker: within them every live worker is heard, the first one or the last.
FULL_ROUND_S = 0.5
# A fleet that is silent for longer has no workers, and requests are refused for that.
QUIET_FLEET_S = 1.0
_POLL_S = 0.02


async def wait_for_fleet(queue: Client, fleet: Fleet) -> None:
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
