"""The deaths of workers that were found lately: remembered, logged, and taken back when a worker is heard again."""

from __future__ import annotations

import logging
import math
import time
from dataclasses import dataclass, field

from shared.log_limit import LogLimit
from shared.messages import Heartbeat


@dataclass(slots=True, eq=False)
class Death:
    """One worker's end as this gateway saw it, corrected when more becomes known.

    Attributes:
        why: For logs and dead letters.
        found_at: Loop time at which it was found.
        is_blamed: Something that this worker ran may be the cause: it ended alone, while others were heard. False when
            many ended together, and again when the worker is heard after all.
        time: Unix seconds at which it was found.
    """

    worker: str
    model: str
    why: str
    found_at: float
    is_blamed: bool
    time: float = field(default_factory=time.time)


_logger = logging.getLogger(__name__)

# How long a death is remembered: to compare it with others, and to retract it when the worker's heartbeats resume.
_MEMORY_S = 600.0
_MAX_REMEMBERED = 1000
# A worker's deaths are logged once in this time, and so are its returns.
LOG_INTERVAL_S = 10.0


@dataclass(slots=True)
class _DeadWorker:
    death: Death
    started: float
    last_seen_at: float


class RememberedDeaths:
    """The last death of each worker."""

    def __init__(self) -> None:
        # Separate limits: a return is logged even right after the death that it retracts.
        self._log_of_deaths = LogLimit(_logger, LOG_INTERVAL_S)
        self._log_of_returns = LogLimit(_logger, LOG_INTERVAL_S)
        self._dead: dict[str, _DeadWorker] = {}
        # By model, and of those that were taken back too.
        self._latest: dict[str, float] = {}

    def add(self, death: Death, started: float, last_seen_at: float) -> None:
        """Remember a death. `started` is in Unix seconds, `last_seen_at` in loop time."""
        # In the order in which they were found.
        self._dead.pop(death.worker, None)
        while self._dead:
            oldest = next(iter(self._dead.values()))
            if death.found_at - oldest.death.found_at <= _MEMORY_S:
                break
            del self._dead[oldest.death.worker]
        if len(self._dead) >= _MAX_REMEMBERED:
            del self._dead[next(iter(self._dead))]
        self._dead[death.worker] = _DeadWorker(death, started, last_seen_at)
        if len(self._latest) >= _MAX_REMEMBERED:
            self._latest.clear()
        self._latest[death.model] = death.found_at
        # A login that may send heartbeats can let any number of made-up workers die.
        self._log_of_deaths.warning(death.worker, "worker %s is dead: %s", death.worker, death.why)

    def retract(self, heartbeat: Heartbeat, now: float) -> float | None:
        """Retract the death of a worker when a heartbeat of the same process arrives at loop time `now`.

        Returns:
            For how long the worker had been silent; None if it was not dead.
        """
        dead = self._dead.get(heartbeat.worker)
        if dead is None or (dead.started, dead.death.model) != process_of(heartbeat):
            return None
        self._log_of_returns.warning(heartbeat.worker, "worker %s is alive again", heartbeat.worker)
        dead.death.is_blamed = False
        del self._dead[heartbeat.worker]
        return now - dead.last_seen_at

    def latest(self, model: str) -> float:
        """Return the loop time at which the last death of a model's workers was found; -inf if none has been."""
        return self._latest.get(model, -math.inf)

    def since(self, model: str, since: float) -> list[Death]:
        """Return the deaths of a model's workers that were found after a loop time."""
        deaths = (dead.death for dead in self._dead.values())
        return [death for death in deaths if death.model == model and death.found_at >= since]

    def has_end_near(self, last_seen_at: float, margin_s: float) -> bool:
        """Whether a worker that is dead was last heard at about this loop time."""
        return any(abs(dead.last_seen_at - last_seen_at) < margin_s for dead in self._dead.values())


def process_of(heartbeat: Heartbeat) -> tuple[float, str]:
    """Return an identity of the process behind a worker's name: start time and model, of which a process serves one."""
    return heartbeat.started, heartbeat.model
