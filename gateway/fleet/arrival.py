"""How a gateway that starts gets to know the fleet before it serves anyone."""

from __future__ import annotations

import asyncio

from nats.aio.client import Client
from nats.errors import Error as NatsError

from gateway.fleet.readiness import FleetView
from shared.errors import DependencyError

# Two heartbeats of a worker: within them every live worker is heard, the first one or the last.
FULL_ROUND_S = 0.5
# A fleet that is silent for so long has no workers, and requests are answered with that.
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
