"""Probes workers whose heartbeats are late.

NATS answers "no responders" at once when a worker's process has ended. A worker that is frozen does not answer at all.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import OrderedDict

from nats.aio.client import Client
from nats.aio.msg import Msg

from gateway.fleet.liveness import Liveness
from shared.nats_connection import SEND_ERRORS
from shared.subjects import probe_subject

MAX_WAITING = 4096
_NO_RESPONDERS = "503"

_logger = logging.getLogger(__name__)


class Prober:
    """Sends probes and reports answers to `liveness`."""

    def __init__(self, nats: Client, liveness: Liveness) -> None:
        """Prepare; `start` must be called once connected."""
        self._nats = nats
        self._liveness = liveness
        self._loop = asyncio.get_running_loop()
        self._inbox = nats.new_inbox()
        self._numbers = itertools.count()
        self._waiting: OrderedDict[str, tuple[str, float]] = OrderedDict()

    async def start(self) -> None:
        """Listen for answers."""
        await self._nats.subscribe(self._inbox + ".*", cb=self._receive)

    async def probe(self, worker: str, now: float) -> None:
        """Probe a worker. `now` is loop time."""
        reply = f"{self._inbox}.{next(self._numbers)}"
        self._waiting[reply] = (worker, now)
        if len(self._waiting) > MAX_WAITING:
            self._waiting.popitem(last=False)
        try:
            await self._nats.publish(probe_subject(worker), b"", reply=reply)
        except SEND_ERRORS as error:
            _logger.warning("worker %s could not be probed: %r", worker, error)

    async def _receive(self, message: Msg) -> None:
        worker, probed_at = self._waiting.pop(message.subject, ("", 0.0))
        if not worker:
            return
        if message.headers and message.headers.get("Status") == _NO_RESPONDERS:
            self._liveness.note_absence(worker, probed_at)
        else:
            self._liveness.note_answer(worker, self._loop.time())
