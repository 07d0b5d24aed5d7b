"""The periodic look at everything that time decides: pauses of this process, NATS, the fleet and the requests.

The parts are isolated from one another: what one of them raises is logged, and the others run all the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections import OrderedDict
from collections.abc import Iterator

from nats.aio.client import Client
from nats.aio.msg import Msg

from gateway.dispatch.nats_watch import NatsWatch
from gateway.dispatch.recovery import Recovery
from gateway.fleet.fleet import Fleet
from gateway.fleet.liveness import Liveness
from shared.calls import answer_inbox, is_no_responders
from shared.log_limit import LogLimit
from shared.nats_connection import SEND_ERRORS
from shared.pause_detector import PauseDetector
from shared.subjects import probe_subject

SWEEP_INTERVAL_S = 0.05
# The same while a worker is silent: each sweep that its death is found later is a longer gap in its streams.
SILENT_SWEEP_INTERVAL_S = 0.02
# A sweep that is later than this follows a pause of this process.
PAUSE_S = 0.25
# Shorter ones are usual on a busy machine, and no line in its log.
LONG_PAUSE_S = 1.0
MAX_WAITING = 4096

_logger = logging.getLogger(__name__)


class Prober:
    """Probes workers whose heartbeats are late, and reports to `liveness`.

    NATS answers "no responders" at once when a worker's process has ended. One that is frozen does not answer at all.
    """

    def __init__(self, nats: Client, liveness: Liveness) -> None:
        self._nats = nats
        self._liveness = liveness
        self._loop = asyncio.get_running_loop()
        self._inbox = answer_inbox(nats)
        self._waiting: OrderedDict[str, tuple[str, float]] = OrderedDict()

    async def start(self) -> None:
        """Listen for answers."""
        await self._nats.subscribe(self._inbox + ".*", cb=self._receive)

    async def probe(self, worker: str, now: float) -> None:
        """Probe a worker. `now` is loop time."""
        reply = f"{self._inbox}.{secrets.token_hex(8)}"
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
        if is_no_responders(message):
            self._liveness.note_absence(worker, probed_at)
        else:
            self._liveness.note_answer(worker, self._loop.time())


class Sweep:
    """Calls the parts in their order; owns nothing but the detector of pauses."""

    def __init__(self, fleet: Fleet, nats_watch: NatsWatch, prober: Prober, recovery: Recovery) -> None:
        self._fleet = fleet
        self._nats_watch = nats_watch
        self._prober = prober
        self._recovery = recovery
        self._loop = asyncio.get_running_loop()
        self._log_limit = LogLimit(_logger)

    async def run(self) -> None:
        """Sweep until cancelled."""
        pauses = PauseDetector(SWEEP_INTERVAL_S, PAUSE_S)
        is_odd = False
        while True:
            is_silent = self._fleet.liveness.is_anyone_silent(self._loop.time())
            await asyncio.sleep(SILENT_SWEEP_INTERVAL_S if is_silent else SWEEP_INTERVAL_S)
            now = self._loop.time()
            is_odd = not is_odd
            if pauses.tick():
                self._discount_pause(pauses, now)
            with self._isolated("the watch of NATS"):
                await self._watch_nats(now)
            # Whether workers can be heard at all must be known before they are judged.
            if not self._nats_watch.owes_answer:
                await self._sweep_fleet(now)
            # There may be thousands of flights, and their times are long.
            if is_odd:
                with self._isolated("the sweep of the requests"):
                    self._recovery.sweep(now, self._nats_watch.is_late)

    def _discount_pause(self, pauses: PauseDetector, now: float) -> None:
        lost_s = pauses.lost_s
        level = logging.WARNING if lost_s >= LONG_PAUSE_S else logging.DEBUG
        _logger.log(level, "this process was paused for %.2f s and computed for %.2f s of it", lost_s, pauses.busy_s)
        with self._isolated("taking note of a pause"):
            self._nats_watch.forget()
            self._fleet.discount_pause(lost_s, now)
            self._recovery.discount_pause(lost_s, now)

    async def _watch_nats(self, now: float) -> None:
        # While NATS was silent nothing could be heard, so that time is not counted as silence of workers or requests.
        if silent_s := await self._nats_watch.review(now):
            self._fleet.discount_silence(silent_s, now)
            self._recovery.discount_pause(silent_s, now)
        if self._nats_watch.refuses:
            self._recovery.refuse_unsent()

    async def _sweep_fleet(self, now: float) -> None:
        with self._isolated("the sweep of the fleet"):
            self._fleet.sweep(now)
        probed = self._fleet.liveness.take_probes(now)
        if probed:
            with self._isolated("a ping"):
                await self._nats_watch.ask()
        for worker in probed:
            with self._isolated("a probe"):
                await self._prober.probe(worker, now)

    @contextlib.contextmanager
    def _isolated(self, part: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._log_limit.warning(part, "%s failed: %r", part, error, exc_info=error)
