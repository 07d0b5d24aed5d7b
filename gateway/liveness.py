"""Which workers are alive, by their heartbeats, their answers to probes, and the progress of their steps.

Owns what is known of each worker; the fleet passes on what is heard. A worker is dead when NATS says that nobody
listens on its probe subject, when it has been silent for four heartbeats and left probes unanswered, or when its step
counter stands still although it has work. While this gateway itself could not hear, because NATS was away or this
process stood still, nobody is declared dead.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from gateway.death import Death
from shared.messages import Heartbeat

_logger = logging.getLogger(__name__)

# How long a death is remembered: to compare it with others, and to correct it when the worker is heard again.
_MEMORY_S = 600.0
_MAX_REMEMBERED = 1000


@dataclass(frozen=True, slots=True)
class FleetLimits:
    """When a worker counts as dead. Times are seconds.

    Attributes:
        heartbeat_s: Time between two heartbeats.
        probe_after_s: Silence after which workers are probed: one heartbeat is missing.
        probe_interval_s: Time between two probes of one worker.
        answer_s: Time that a worker has to answer a probe.
        silence_s: Silence, probes included, after which a worker is dead although its connection stands.
        stall_s: Time for which a worker's step counter may stand still while it has work.
        hearing_grace_s: Time after this gateway could not hear during which nobody is declared dead.
        disturbance_s: Time after a death, an absence of NATS or a pause during which requests may still be lost on
            their way to a worker.
    """

    heartbeat_s: float = 0.25
    probe_after_s: float = 0.35
    probe_interval_s: float = 0.2
    answer_s: float = 0.3
    silence_s: float = 1.0
    stall_s: float = 10.0
    hearing_grace_s: float = 1.5
    disturbance_s: float = 2.5


@dataclass(slots=True)
class _Worker:
    """What is known of one worker. Times are loop time.

    Attributes:
        unanswered_since: First probe since the last sign of life.
        absent_at: When the probe was sent to which nobody listened.
    """

    heartbeat: Heartbeat
    heard_at: float
    stepped_at: float
    asked_at: float = -math.inf
    unanswered_since: float | None = None
    absent_at: float = -math.inf
    is_stalled: bool = False

    @property
    def is_absent(self) -> bool:
        return self.absent_at > self.heard_at

    def hear(self, now: float) -> None:
        self.heard_at = now
        self.unanswered_since = None


@dataclass(slots=True)
class _Grave:
    death: Death
    started: float
    heard_at: float


class Liveness:
    """All workers that are heard.

    Attributes:
        on_dead: Called with each death when it is found.
    """

    def __init__(self, limits: FleetLimits) -> None:
        """Know no worker."""
        self._limits = limits
        self._workers: dict[str, _Worker] = {}
        self._graves: dict[str, _Grave] = {}
        self._is_disconnected = False
        self._judge_after = 0.0
        self._disturbed_until = -math.inf
        self._swept_at = -math.inf
        self.on_dead: Callable[[Death], None] = lambda death: None

    def live(self) -> Iterator[Heartbeat]:
        """Iterate over the last heartbeats of all workers that are not dead."""
        return (worker.heartbeat for worker in self._workers.values() if not worker.is_stalled)

    def hear(self, heartbeat: Heartbeat, now: float) -> None:
        """Take in a worker's heartbeat. `now` is loop time, here and below."""
        name = heartbeat.worker
        worker = self._workers.get(name)
        if worker is not None and worker.heartbeat.started != heartbeat.started:
            self._bury(worker, now, "it was restarted", is_blamed=self._can_judge(now))
            worker = None
        if worker is None:
            self._withdraw(heartbeat)
            self._workers[name] = _Worker(heartbeat, now, now)
            return
        if heartbeat.step != worker.heartbeat.step or heartbeat.running == 0:
            worker.stepped_at = now
            if worker.is_stalled:
                worker.is_stalled = False
                self._withdraw(heartbeat)
        worker.heartbeat = heartbeat
        worker.hear(now)

    def note_answer(self, name: str, now: float) -> None:
        """Take note that a worker has answered a probe."""
        if name in self._workers:
            self._workers[name].hear(now)

    def note_absence(self, name: str, asked_at: float) -> None:
        """Take note that nobody listened to the probe that was sent to a worker at `asked_at`."""
        if name in self._workers:
            self._workers[name].absent_at = asked_at

    def nats_disconnected(self) -> None:
        """Stop judging: the connection over which heartbeats come is down."""
        self._is_disconnected = True

    def nats_reconnected(self, now: float) -> None:
        """Judge again, after a grace period in which everybody can be heard."""
        self._is_disconnected = False
        self._judge_after = now + self._limits.hearing_grace_s
        self._disturbed_until = now + self._limits.disturbance_s

    def forgive(self, lost_s: float, now: float) -> None:
        """Do not count the last `lost_s` seconds as anybody's silence: this process stood still."""
        for worker in self._workers.values():
            worker.heard_at = min(now, worker.heard_at + lost_s)
            worker.stepped_at = min(now, worker.stepped_at + lost_s)
            worker.unanswered_since = None
        self._judge_after = max(self._judge_after, now + self._limits.probe_after_s)
        self._disturbed_until = now + self._limits.disturbance_s

    def take_probes(self, now: float) -> list[str]:
        """Return the workers to probe now: all, as soon as one is silent, to see whether it is alone with that."""
        limits = self._limits
        if not self._can_judge(now) or not self._is_anyone_silent(now):
            return []
        due = [name for name, worker in self._workers.items() if now - worker.asked_at > limits.probe_interval_s]
        for name in due:
            worker = self._workers[name]
            worker.asked_at = now
            if worker.unanswered_since is None:
                worker.unanswered_since = now
        return due

    def sweep(self, now: float) -> bool:
        """Find the dead; say whether there are new ones. Called several times in a heartbeat."""
        self._swept_at = now
        if not self._can_judge(now):
            return False
        causes = [(name, worker, self._cause(worker, now)) for name, worker in self._workers.items()]
        # All are judged before any is removed: who ends together with others is compared with them.
        dead = [(name, worker, why, self._is_blamed(worker)) for name, worker, why in causes if why is not None]
        for name, worker, why, is_blamed in dead:
            if now - worker.heard_at > self._limits.probe_after_s:
                del self._workers[name]
                self._bury(worker, now, why, is_blamed=is_blamed)
            else:
                # It beats, so nothing is wrong with NATS or with us, and it may go on to work.
                worker.is_stalled = True
                self._bury(worker, now, why, is_blamed=True)
        return bool(dead)

    def is_gone(self, name: str) -> bool:
        """Whether a worker is known to be dead, or not known although it could be heard."""
        worker = self._workers.get(name)
        return self._can_judge(self._swept_at) and (worker is None or worker.is_stalled)

    def is_disturbed(self, now: float) -> bool:
        """Whether a worker is silent, or something was lately, so that requests may have gone where nobody is."""
        return self._is_anyone_silent(now) or now < self._disturbed_until

    def deaths_since(self, model: str, since: float) -> list[Death]:
        """Return the deaths of a model's workers that were found after a loop time."""
        deaths = (grave.death for grave in self._graves.values())
        return [death for death in deaths if death.model == model and death.found_at >= since]

    def _can_judge(self, now: float) -> bool:
        return not self._is_disconnected and now >= self._judge_after and now > -math.inf

    def _is_anyone_silent(self, now: float) -> bool:
        return any(now - worker.heard_at > self._limits.probe_after_s for worker in self._workers.values())

    def _cause(self, worker: _Worker, now: float) -> str | None:
        """Say why a worker is dead; None for one that is not, or is known to be."""
        limits = self._limits
        silence_s = now - worker.heard_at
        waited_s = 0.0 if worker.unanswered_since is None else now - worker.unanswered_since
        if worker.is_absent:
            # Without others that are heard there is nowhere to go: then it may be that nobody is, or all of them.
            is_certain = len(self._workers) == 1 or self._has_survivors(worker) or waited_s > limits.answer_s
            return "it is not there any more" if is_certain else None
        if silence_s > limits.silence_s and waited_s > limits.answer_s:
            return f"nothing was heard for {silence_s:.1f} s"
        standstill_s = now - worker.stepped_at
        if worker.heartbeat.running > 0 and not worker.is_stalled and standstill_s > limits.stall_s:
            return f"it has work but made no step for {standstill_s:.1f} s"
        return None

    def _has_survivors(self, worker: _Worker) -> bool:
        """Whether others were heard more than a heartbeat after this one, so that it did not end with all of them."""
        latest = worker.heard_at + 1.1 * self._limits.heartbeat_s
        others = (other for other in self._workers.values() if other is not worker)
        return any(other.heard_at > latest and not other.is_absent for other in others)

    def _is_blamed(self, worker: _Worker) -> bool:
        if self._has_survivors(worker):
            return True
        margin_s = 1.1 * self._limits.heartbeat_s
        is_last = len(self._workers) == 1
        ended_with_others = any(abs(grave.heard_at - worker.heard_at) < margin_s for grave in self._graves.values())
        # Silence of the only worker may be ours. That nobody listens is its own end.
        return is_last and not ended_with_others and worker.is_absent

    def _bury(self, worker: _Worker, now: float, why: str, *, is_blamed: bool) -> None:
        heartbeat = worker.heartbeat
        name = heartbeat.worker
        death = Death(name, heartbeat.model, why, now, is_blamed)
        for old in [key for key, grave in self._graves.items() if now - grave.death.found_at > _MEMORY_S]:
            del self._graves[old]
        if len(self._graves) >= _MAX_REMEMBERED:
            del self._graves[next(iter(self._graves))]
        self._disturbed_until = now + self._limits.disturbance_s
        self._graves[name] = _Grave(death, heartbeat.started, worker.heard_at)
        _logger.warning("worker %s is dead: %s", name, why)
        self.on_dead(death)

    def _withdraw(self, heartbeat: Heartbeat) -> None:
        """Take back that a worker was dead, when the same process is heard again."""
        grave = self._graves.get(heartbeat.worker)
        if grave is not None and grave.started == heartbeat.started:
            _logger.warning("worker %s lives after all", heartbeat.worker)
            grave.death.is_blamed = False
            del self._graves[heartbeat.worker]
