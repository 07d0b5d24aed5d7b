"""Which workers are alive, by their heartbeats, their answers to probes, and the progress of their steps.

Owns the state of each worker. A worker is dead when NATS reports no responders on its probe subject, when it is silent
and leaves probes unanswered, or when its step counter stands still although it has work. How long it may be silent
depends on how late its heartbeats have been lately: one on a busy machine is not taken for dead, while one that is
always on time is missed at once. None is declared dead while this gateway could receive nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from gateway.fleet.deaths import Death, RememberedDeaths, process_of
from gateway.fleet.queue_takers import all_pulled, pulled_up_to
from gateway.fleet.resumption import Resumption
from shared.messages import Heartbeat
from shared.subjects import Queue

LATENESS_FACTOR = 3.0
# Times `silence_s` after which a silence is not lateness: no longer timeout would have covered it.
_STANDSTILL_FACTOR = 2.0
# Decay factor of a lateness at each heartbeat: half of it is left after six seconds.
_LATENESS_KEPT = 0.977
# Heartbeats after which the process of a worker is gone if another one has its name: a new one takes longer to start.
_NAMESAKE_FACTOR = 2.0
# The same for the assumed lateness of a newly seen worker: a tenth of it is left after two seconds on time.
_ASSUMPTION_KEPT = 0.8


@dataclass(frozen=True, slots=True)
class FleetLimits:
    """When a worker counts as dead. Times are seconds.

    Attributes:
        heartbeat_s: Time between two heartbeats.
        probe_after_s: Silence after which workers are probed: one heartbeat is missing.
        probe_interval_s: Time between two probes of one worker.
        answer_s: Time that a worker has to answer a probe.
        silence_s: Silence, probes included, after which a worker is dead although its connection stands.
        punctual_answer_s, punctual_silence_s: The same for a worker whose heartbeats have all been on time. Each second
            of lateness counts `LATENESS_FACTOR` times on top.
        stall_s: Time for which a worker's step counter may stand still while it has work.
        reconnect_grace_s: Time after a reconnect to NATS during which no worker is declared dead.
        disturbance_s: Time after a death, an absence of NATS or a pause during which requests may still be lost on
            their way to a worker.
    """

    heartbeat_s: float = 0.2
    probe_after_s: float = 0.25
    probe_interval_s: float = 0.2
    answer_s: float = 0.3
    silence_s: float = 1.0
    punctual_answer_s: float = 0.1
    punctual_silence_s: float = 0.35
    stall_s: float = 10.0
    reconnect_grace_s: float = 1.5
    disturbance_s: float = 2.5


@dataclass(slots=True)
class _Worker:
    """State of one worker. Times are loop time.

    Attributes:
        told_at: When its last heartbeat came.
        told_idle_at: When the one before came, if it was sent no request in between.
        beaten_at: `told_at` without pauses of this process; `last_seen_at` counts answers to probes too.
        lateness_s: Greatest lateness of its heartbeats, decaying over time.
        assumed_s: Lateness assumed of a new worker, and after a pause of this process; decays with each heartbeat.
        unanswered_since: First probe since the last sign of life.
        absent_at: When the probe was sent to which NATS answered that there are no responders.
        resumption: Its heartbeats since NATS was away; None if NATS has always been there.
        is_excused: A silence of NATS was not counted as its own, and it has shown no sign of life since.
    """

    heartbeat: Heartbeat
    last_seen_at: float
    stepped_at: float
    told_at: float
    beaten_at: float
    lateness_s: float
    assumed_s: float
    told_idle_at: float = -math.inf
    probed_at: float = -math.inf
    unanswered_since: float | None = None
    absent_at: float = -math.inf
    is_stalled: bool = False
    resumption: Resumption | None = None
    is_excused: bool = False

    @property
    def is_absent(self) -> bool:
        return self.absent_at > self.last_seen_at

    def note_sign_of_life(self, now: float) -> None:
        self.last_seen_at = now
        self.unanswered_since = None
        self.is_excused = False


class Liveness:
    """All workers whose heartbeats arrive."""

    def __init__(
        self,
        limits: FleetLimits,
        on_dead: Callable[[Death], None] = lambda death: None,
        on_reconnected: Callable[[str], None] = lambda worker: None,
    ) -> None:
        self._limits = limits
        self._workers: dict[str, _Worker] = {}
        self.deaths = RememberedDeaths()
        self._is_disconnected = False
        self._judge_after = 0.0
        self._disturbed_until = -math.inf
        # Until then a silence is more likely the end of a pause or an outage than something that a request has caused.
        self._unsettled_until = -math.inf
        self._max_lateness_s = (limits.silence_s - limits.punctual_silence_s) / LATENESS_FACTOR
        self._swept_at = -math.inf
        # When the worker that was heard last was heard, as of this sweep; those that are known to be gone apart.
        self._latest_seen_at = -math.inf
        self._on_dead = on_dead
        self._on_reconnected = on_reconnected

    @property
    def num_workers(self) -> int:
        """How many are known and not dead."""
        return len(self._workers)

    def knows(self, name: str) -> bool:
        """Whether a worker is one of them."""
        return name in self._workers

    def model_of(self, name: str) -> str | None:
        """Return the model for which a worker holds its name; None if its heartbeats have stopped for `silence_s`.

        Answers to probes do not count: a new process of this name that serves another model answers them too.
        """
        worker = self._workers.get(name)
        # As of the last sweep: after a pause of this process, it comes behind `discount_pause`.
        if worker is None or (
            self._can_judge(self._swept_at) and self._swept_at - worker.beaten_at > self._limits.silence_s
        ):
            return None
        return worker.heartbeat.model

    def last_heartbeat(self, name: str) -> Heartbeat | None:
        """Return the last heartbeat of a worker that is known and not dead."""
        return None if (worker := self._workers.get(name)) is None else worker.heartbeat

    def has_read(self, beat: Heartbeat, queue: Queue, stream_seq: int, published_at: float, since: float) -> bool:
        """Whether a worker has told since then, and had read by then what NATS had sent it of a published request.

        It was sent a later one, or none between two heartbeats: a busy worker tells of an empty queue while hundreds
        of messages are on their way. What this process reads right after a pause, or an absence of NATS, is older.
        """
        worker = self._workers.get(beat.worker)
        if worker is None or worker.told_at < max(since, published_at):
            return False
        return worker.told_idle_at >= max(published_at, self._judge_after) or pulled_up_to(beat, queue) >= stream_seq

    def live(self) -> Iterator[Heartbeat]:
        """Iterate over the last heartbeats of all workers that are not dead; a thread may, too."""
        return (worker.heartbeat for worker in list(self._workers.values()) if not worker.is_stalled)

    def note_heartbeat(self, heartbeat: Heartbeat, now: float) -> None:
        """Take in a worker's heartbeat. `now` is loop time, here and below."""
        name = heartbeat.worker
        worker = self._workers.get(name)
        if worker is not None and process_of(worker.heartbeat) != process_of(heartbeat):
            if now - worker.beaten_at <= _NAMESAKE_FACTOR * self._limits.heartbeat_s:
                # Both are alive: the second process of this name has to end, and the first one has not.
                return
            self._declare_dead(worker, now, "it was restarted", is_blamed=self._can_judge(now))
            worker = None
        if worker is None:
            lateness_s = self._lateness_at_return(self.deaths.retract(heartbeat, now))
            self._workers[name] = _Worker(heartbeat, now, now, now, now, lateness_s, self._max_lateness_s)
            return
        lateness_s = now - worker.beaten_at - self._limits.heartbeat_s
        worker.lateness_s = min(self._max_lateness_s, max(lateness_s, _LATENESS_KEPT * worker.lateness_s))
        worker.assumed_s *= _ASSUMPTION_KEPT
        worker.told_idle_at = worker.told_at if all_pulled(heartbeat) == all_pulled(worker.heartbeat) else -math.inf
        worker.told_at = worker.beaten_at = now
        if heartbeat.step != worker.heartbeat.step or heartbeat.running == 0:
            worker.stepped_at = now
            if worker.is_stalled:
                worker.is_stalled = False
                self.deaths.retract(heartbeat, now)
        if heartbeat.num_reconnects != worker.heartbeat.num_reconnects:
            worker.resumption = Resumption()
            self._on_reconnected(name)
        worker.heartbeat = heartbeat
        worker.note_sign_of_life(now)
        if worker.resumption is not None:
            worker.resumption.note_heartbeat(heartbeat, now)

    def note_answer(self, name: str, now: float) -> None:
        """Take note that a worker has answered a probe."""
        if name in self._workers:
            self._workers[name].note_sign_of_life(now)

    def note_absence(self, name: str, probed_at: float) -> None:
        """Take note that the probe sent to a worker at `probed_at` had no listener."""
        if name in self._workers:
            self._workers[name].absent_at = probed_at

    def nats_disconnected(self) -> None:
        """Declare no worker dead: the connection over which heartbeats come is down."""
        self._is_disconnected = True
        for worker in self._workers.values():
            worker.resumption = Resumption()

    def nats_reconnected(self, now: float) -> None:
        """Declare workers dead again, after a grace period in which each of them sends a heartbeat."""
        self._is_disconnected = False
        self._judge_after = now + self._limits.reconnect_grace_s
        self._disturbed_until = self._unsettled_until = now + self._limits.disturbance_s

    def discount_pause(self, lost_s: float, now: float) -> None:
        """Do not count the last `lost_s` seconds as silence of the workers: this process was paused."""
        self._discount(self._workers.values(), lost_s, now)

    def discount_silence(self, lost_s: float, now: float) -> None:
        """Do not count the last `lost_s` seconds as silence of the workers: NATS was silent, and answered late.

        Once for each worker, until it is heard again: over a link on which every answer is late, nothing but late
        answers comes in when all workers are dead, and their deaths would never be found.
        """
        excused = [worker for worker in self._workers.values() if not worker.is_excused]
        if excused:
            self._discount(excused, lost_s, now)
        for worker in excused:
            worker.is_excused = True

    def _discount(self, workers: Iterable[_Worker], lost_s: float, now: float) -> None:
        for worker in workers:
            worker.last_seen_at = min(now, worker.last_seen_at + lost_s)
            worker.stepped_at = min(now, worker.stepped_at + lost_s)
            worker.unanswered_since = None
            worker.beaten_at = now
            # What paused this process may have paused others, and some of them for a little longer.
            worker.assumed_s = self._max_lateness_s
        self._unsettled_until = now + self._limits.disturbance_s
        self._judge_after = max(self._judge_after, now + self._limits.probe_after_s)
        self._disturbed_until = now + self._limits.disturbance_s

    def take_probes(self, now: float) -> list[str]:
        """Return the workers to probe now: all of them as soon as one is silent, since others may be too."""
        limits = self._limits
        if not self._can_judge(now) or not self.is_anyone_silent(now):
            return []
        due = [name for name, worker in self._workers.items() if now - worker.probed_at > limits.probe_interval_s]
        for name in due:
            worker = self._workers[name]
            worker.probed_at = now
            if worker.unanswered_since is None:
                worker.unanswered_since = now
        return due

    def sweep(self, now: float) -> bool:
        """Find the dead; return whether there are new ones. Called several times in a heartbeat."""
        self._swept_at = now
        if not self._can_judge(now):
            return False
        present = [worker.last_seen_at for worker in self._workers.values() if not worker.is_absent]
        self._latest_seen_at = max(present, default=-math.inf)
        heard_after = now - self._limits.punctual_silence_s
        stepped_after = now - self._limits.stall_s
        # Nearly all are heard and make steps.
        doubtful = [
            (name, worker)
            for name, worker in self._workers.items()
            if worker.last_seen_at < heard_after or worker.stepped_at < stepped_after or worker.is_absent
        ]
        causes = [(name, worker, self._cause(worker, now)) for name, worker in doubtful]
        # All are judged before any is removed, because workers that ended together are not blamed.
        dead = [(name, worker, why, self._is_blamed(worker, now)) for name, worker, why in causes if why is not None]
        for name, worker, why, is_blamed in dead:
            if now - worker.last_seen_at > self._limits.probe_after_s:
                del self._workers[name]
                self._declare_dead(worker, now, why, is_blamed=is_blamed)
            else:
                # Its heartbeats arrive, so neither NATS nor this process is at fault. It may make steps again later.
                worker.is_stalled = True
                self._declare_dead(worker, now, why, is_blamed=True)
        return bool(dead)

    def is_gone(self, name: str) -> bool:
        """Whether a worker is known to be dead, or is unknown although its heartbeats would arrive."""
        worker = self._workers.get(name)
        return self._can_judge(self._swept_at) and (worker is None or worker.is_stalled)

    def has_resumed(self, name: str, now: float, *, has_output: bool) -> bool:
        """Whether all that a worker will say of a request that it held before NATS was away must have come by now."""
        worker = self._workers.get(name)
        if worker is None or worker.resumption is None:
            return False
        return worker.resumption.is_complete(now, has_output=has_output)

    def is_anyone_silent(self, now: float) -> bool:
        """Whether a worker has missed a heartbeat, and has not answered a probe since."""
        return any(now - worker.last_seen_at > self._limits.probe_after_s for worker in self._workers.values())

    def is_disturbed(self, now: float) -> bool:
        """Whether requests may have gone to a dead worker: one is silent, or there was a disturbance lately."""
        return self.is_anyone_silent(now) or now < self._disturbed_until

    def _lateness_at_return(self, silent_s: float | None) -> float:
        # One that was only late may be again. One that stood still for long was taken for dead rightly.
        was_late = silent_s is not None and silent_s <= _STANDSTILL_FACTOR * self._limits.silence_s
        return self._max_lateness_s if was_late else 0.0

    def _can_judge(self, now: float) -> bool:
        return not self._is_disconnected and now >= self._judge_after and now > -math.inf

    def _cause(self, worker: _Worker, now: float) -> str | None:
        """Return why a worker is dead; None if it is alive, or known to be dead."""
        limits = self._limits
        silence_s = now - worker.last_seen_at
        waited_s = 0.0 if worker.unanswered_since is None else now - worker.unanswered_since
        if worker.is_absent:
            # While no other worker is heard, all may have ended, or NATS may be at fault: wait for an answer first.
            is_certain = len(self._workers) == 1 or self._has_survivors(worker) or waited_s > limits.answer_s
            return "it is not there any more" if is_certain else None
        more_s = LATENESS_FACTOR * max(worker.lateness_s, worker.assumed_s)
        answer_s = min(limits.answer_s, limits.punctual_answer_s + more_s)
        if silence_s > limits.punctual_silence_s + more_s and waited_s > answer_s:
            return f"nothing was heard for {silence_s:.1f} s"
        standstill_s = now - worker.stepped_at
        if worker.heartbeat.running > 0 and not worker.is_stalled and standstill_s > limits.stall_s:
            return f"it has work but made no step for {standstill_s:.1f} s"
        return None

    def _has_survivors(self, worker: _Worker) -> bool:
        """Whether another worker was heard more than a heartbeat after this one, so that not all ended together."""
        return self._latest_seen_at > worker.last_seen_at + 1.1 * self._limits.heartbeat_s

    def _is_blamed(self, worker: _Worker, now: float) -> bool:
        if now < self._unsettled_until and not worker.is_absent:
            return False
        if self._has_survivors(worker):
            return True
        margin_s = 1.1 * self._limits.heartbeat_s
        is_last = len(self._workers) == 1
        ended_with_others = self.deaths.has_end_near(worker.last_seen_at, margin_s)
        # If the only worker is silent, the fault may be this gateway's. No responders prove that the worker ended.
        return is_last and not ended_with_others and worker.is_absent

    def _declare_dead(self, worker: _Worker, now: float, why: str, *, is_blamed: bool) -> None:
        death = Death(worker.heartbeat.worker, worker.heartbeat.model, why, now, is_blamed)
        self._disturbed_until = now + self._limits.disturbance_s
        self.deaths.add(death, worker.heartbeat.started, worker.last_seen_at)
        self._on_dead(death)
