"""Takes requests out of service that harm workers or that no worker keeps, and writes them down as dead letters."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from nats.aio.client import Client

from gateway.dispatch.inflight import Flight
from gateway.errors import ApiError
from shared.background_tasks import BackgroundTasks
from shared.dead_letters import DeadAttempt, DeadLetter, DeadReason, publish_dead_letter
from shared.errors import DependencyError

_logger = logging.getLogger(__name__)


class Quarantine:
    """Writes dead letters in the background: the client's answer does not wait for them."""

    def __init__(self, nats: Client, gateway: str, on_take: Callable[[DeadReason], None] = lambda reason: None) -> None:
        """Write in the name of `gateway`; `on_take` is called with the reason of each quarantine, for metrics."""
        self._nats = nats
        self._gateway = gateway
        self._tasks = BackgroundTasks()
        self._on_take = on_take

    def take(self, flight: Flight, reason: DeadReason, why: str) -> ApiError:
        """Write a flight down, and return what its client is told."""
        message = f"{why} The request is in quarantine under the id {flight.id}."
        attempts = tuple(
            DeadAttempt(loss.death.worker, loss.epoch, loss.death.time, loss.death.why) for loss in flight.losses
        )
        letter = DeadLetter(
            request=flight.attempt(),
            reason=reason,
            error=message,
            attempts=attempts,
            quarantined_by=self._gateway,
            quarantined=time.time(),
        )
        _logger.error("request %s of tenant %s is quarantined: %s", flight.id, flight.request.tenant, why)
        self._on_take(reason)
        self._tasks.spawn(self._write(letter))
        return ApiError(500, message, code="request_quarantined", headers={"x-should-retry": "false"})

    async def close(self) -> None:
        """Wait for the letters on their way."""
        await self._tasks.wait()

    async def _write(self, letter: DeadLetter) -> None:
        try:
            await publish_dead_letter(self._nats, letter)
        except DependencyError as error:
            _logger.error("request %s has no dead letter: %s", letter.request.id, error)
