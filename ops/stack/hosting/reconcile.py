"""Decides which workers a host starts and stops now: a function of its model list and its observations.

No clock, process or queue is touched here. Memory counts until a process has ended, so a host never has more workers
than fit. A model that sleeps when idle gives way to another after `min_awake_s`: at once while nothing runs or waits
for it, and else to one whose requests have waited as long. So models that do not fit beside each other take turns, the
one that has waited longest first, and never thrash.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

LEAST_TURN_S = 1.0
"""For how long a busy model serves at least, whatever `--min-awake-s` is: it takes its requests in that time."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A model that the host is to serve.

    Attributes:
        generation: Raised when the model is replaced: workers of older generations serve until new ones do.
        on_demand: It sleeps after `idle_s` seconds without requests, and is loaded when some wait.
        need_bytes: Memory of one worker.
    """

    name: str
    generation: int = 0
    workers: int = 1
    on_demand: bool = False
    idle_s: float = 300.0
    need_bytes: int = 0


@dataclass(frozen=True, slots=True)
class SeenWorker:
    """A process; it is `ready` from its first heartbeat (`ready_at`) on, and `busy` while it has requests.

    No person waits for these where they are batch jobs alone (`only_batch`).
    """

    id: str
    model: str
    generation: int
    need_bytes: int
    phase: Literal["loading", "ready", "stopping"]
    ready_at: float = math.inf
    busy: bool = False
    only_batch: bool = False

    @property
    def serves_people(self) -> bool:
        """Whether it has interactive requests."""
        return self.busy and not self.only_batch


@dataclass(slots=True)
class Activity:
    """State of a model besides its workers.

    Attributes:
        waiting: Requests in its queues.
        batch: How many of them are batch jobs, which are not interactive.
        active_at: When it last had work, or became ready; -inf when it is ordered to sleep.
        waits_since: Since when requests wait, or a wake is ordered, without a running worker; inf otherwise.
        asked: A wake is ordered, although no request waits.
        may_start_at: After failures, the earliest time for the next start.
    """

    waiting: int = 0
    batch: int = 0
    active_at: float = -math.inf
    waits_since: float = math.inf
    asked: bool = False
    may_start_at: float = -math.inf

    def note(self, waiting: int, batch: int, workers: Sequence[SeenWorker], now: float) -> None:
        """Take in how many requests wait, and what its workers do."""
        self.waiting, self.batch = waiting, batch
        if waiting or any(worker.busy for worker in workers):
            self.active_at = now
        runs = any(worker.phase != "stopping" for worker in workers)
        waits = not runs and (waiting > 0 or self.asked)
        self.waits_since = min(self.waits_since, now) if waits else math.inf

    @property
    def people(self) -> int:
        """Requests in its queues for which people wait."""
        return self.waiting - self.batch

    @property
    def turn(self) -> tuple[bool, bool, float]:
        """Whose turn it is: people go before batch jobs, and these before a model that is only asked for.

        Among equals the longest wait goes first.
        """
        return not self.people, not self.waiting, self.waits_since


@dataclass(slots=True)
class Decision:
    """Models to start one worker of, once for each; workers to stop; models for which nothing can give way."""

    starts: list[str] = field(default_factory=list)
    stops: list[str] = field(default_factory=list)
    no_room: set[str] = field(default_factory=set)


@dataclass(slots=True)
class _Host:
    """One decision in the making, as `decide` is asked for it."""

    wanted: Mapping[str, Wanted]
    workers: Sequence[SeenWorker]
    activities: Mapping[str, Activity]
    budget_bytes: float
    min_awake_s: float
    now: float
    decision: Decision = field(default_factory=Decision)
    used_bytes: int = field(init=False)
    leaving_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.used_bytes = sum(worker.need_bytes for worker in self.workers)
        self.leaving_bytes = sum(worker.need_bytes for worker in self.workers if worker.phase == "stopping")

    def decide(self) -> Decision:
        for worker in self.workers:
            if worker.phase != "stopping" and worker.model not in self.wanted:
                self._stop(worker)
        # Those that always run come first; of the others, the one that has waited longest for its turn.
        order = sorted(self.wanted.values(), key=lambda want: (want.on_demand, *self._activity(want).turn))
        for want in order:
            self._trim(want)
        for want in order:
            self._grow(want)
        return self.decision

    def _activity(self, want: Wanted) -> Activity:
        return self.activities.get(want.name) or Activity()

    def _alive(self, want: Wanted) -> list[SeenWorker]:
        stopped = self.decision.stops
        return [w for w in self.workers if w.model == want.name and w.phase != "stopping" and w.id not in stopped]

    def _target(self, want: Wanted) -> int:
        if not want.on_demand:
            return want.workers
        activity, alive = self._activity(want), self._alive(want)
        has_work = activity.waiting > 0 or activity.asked or any(worker.busy for worker in alive)
        is_loading = any(worker.phase == "loading" for worker in alive)
        is_fresh = bool(alive) and self.now - activity.active_at < want.idle_s
        return want.workers if has_work or is_loading or is_fresh else 0

    def _trim(self, want: Wanted) -> None:
        """Stop workers that are too many, and those of older generations once new ones serve."""
        target, alive = self._target(want), self._alive(want)
        current = [worker for worker in alive if worker.generation == want.generation]
        if sum(worker.phase == "ready" for worker in current) >= target:
            for worker in alive:
                if worker.generation != want.generation:
                    self._stop(worker)
        first_to_go = sorted(current, key=lambda worker: (worker.busy, worker.ready_at))
        for worker in first_to_go[: max(0, len(current) - target)]:
            self._stop(worker)

    def _grow(self, want: Wanted) -> None:
        if self.now < self._activity(want).may_start_at:
            return
        current = [worker for worker in self._alive(want) if worker.generation == want.generation]
        for _ in range(self._target(want) - len(current)):
            missing = self.used_bytes + want.need_bytes - self.budget_bytes
            if missing > 0:
                if self._make_room(want, missing - self.leaving_bytes):
                    # Later requests must not take the memory that is being freed for it.
                    self.used_bytes += want.need_bytes
                return
            self.decision.starts.append(want.name)
            self.used_bytes += want.need_bytes

    def _make_room(self, want: Wanted, missing: float) -> bool:
        """End models that may give way if that frees `missing` bytes; else nothing.

        First idle ones, least recently used first; where people wait, those with batch jobs alone are. Then busy ones,
        longest awake first, whose workers drain; batch jobs never end what serves people. A model that is only asked
        for takes no room of one that was used within `min_awake_s`: who pays for no answer must not keep those asleep
        who do.
        """
        own = self._activity(want)
        others = [other for other in self.wanted.values() if other.name != want.name and self._gives_way(other)]
        idle_s = 0.0 if own.waiting else self.min_awake_s
        is_busy = self._serves_people if own.people else self._has_work
        candidates = [
            other for other in others if not is_busy(other) and self.now - self._activity(other).active_at >= idle_s
        ]
        candidates.sort(key=lambda other: self._activity(other).active_at)
        if own.waiting and self.now - own.waits_since >= self.min_awake_s:
            busy = [
                other
                for other in others
                if is_busy(other) and self._has_begun(other) and (own.people or not self._serves_people(other))
            ]
            candidates += sorted(busy, key=lambda other: min(worker.ready_at for worker in self._alive(other)))
        victims: list[SeenWorker] = []
        for other in candidates:
            if sum(victim.need_bytes for victim in victims) >= missing:
                break
            victims += self._alive(other)
        if sum(victim.need_bytes for victim in victims) < missing:
            self.decision.no_room.add(want.name)
            return False
        for victim in victims:
            self._stop(victim)
        return True

    def _gives_way(self, want: Wanted) -> bool:
        """Whether it has had its turn."""
        alive = self._alive(want)
        if not want.on_demand or self._activity(want).asked or want.name in self.decision.starts:
            return False
        return bool(alive) and all(
            worker.phase == "ready" and self.now - worker.ready_at >= self.min_awake_s for worker in alive
        )

    def _has_begun(self, want: Wanted) -> bool:
        """Whether it has served long enough to take requests; else two busy models could end each other for ever."""
        return all(self.now - worker.ready_at >= LEAST_TURN_S for worker in self._alive(want))

    def _has_work(self, want: Wanted) -> bool:
        return self._activity(want).waiting > 0 or any(worker.busy for worker in self._alive(want))

    def _serves_people(self, want: Wanted) -> bool:
        return self._activity(want).people > 0 or any(worker.serves_people for worker in self._alive(want))

    def _stop(self, worker: SeenWorker) -> None:
        self.decision.stops.append(worker.id)
        self.leaving_bytes += worker.need_bytes


def decide(
    wanted: Mapping[str, Wanted],
    workers: Sequence[SeenWorker],
    activities: Mapping[str, Activity],
    budget_bytes: int | None,
    min_awake_s: float,
    now: float,
) -> Decision:
    """Decide what to start and to stop.

    Args:
        wanted: The models by name.
        workers: All processes that have not ended, those that are stopping too.
        activities: States of the models.
        budget_bytes: Memory of all workers; None for no bound.
        min_awake_s: A loaded model serves at least this long before it gives way to another.
        now: The time, by the same clock as all other times.
    """
    budget = math.inf if budget_bytes is None else budget_bytes
    return _Host(wanted, workers, activities, budget, min_awake_s, now).decide()
