"""Virtual time, and the real engine in it, on a runner that computes nothing and says when a step is due.

Callbacks come in the order of their times, those of one moment in the order in which they were added.

`gpu_worker.execution.simulated_runner` paces a real worker by the wall clock and answers whatever a request may ask
for. This runner only has to be cheap: it knows no sequences, and every token is the same.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable

from msgspec import Struct

from gpu_worker.core.plan import StepPlan
from gpu_worker.core.scheduler import Scheduler
from gpu_worker.core.scheduler_config import SchedulerConfig
from gpu_worker.core.step import SampledTokens, ScheduledStep, SequenceEvent, StepResult
from gpu_worker.core.tiers import KvTiers
from gpu_worker.engine.engine import Engine
from ops.simulation.step_time import StepTimes, step_work

Callback = Callable[[], object]


class VirtualTimer:
    """A scheduled callback."""

    __slots__ = ("callback",)

    def __init__(self, callback: Callback) -> None:
        self.callback: Callback | None = callback

    def cancel(self) -> None:
        """Drop the callback."""
        self.callback = None


class VirtualClock:
    """Owns the time.

    Attributes:
        now: Seconds since the beginning.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._timers: list[tuple[float, int, VirtualTimer]] = []
        self._numbers = itertools.count()

    def time(self) -> float:
        """Return `now`, as a function of the clock."""
        return self.now

    def call_later(self, delay: float, callback: Callback) -> VirtualTimer:
        """Schedule a callback `delay` seconds from now."""
        return self.call_at(self.now + delay, callback)

    def call_at(self, at: float, callback: Callback) -> VirtualTimer:
        """Call a function when the virtual clock reaches a time."""
        timer = VirtualTimer(callback)
        heapq.heappush(self._timers, (at, next(self._numbers), timer))
        return timer

    def run(self, is_over: Callable[[], bool], until: float = float("inf")) -> None:
        """Run callbacks until `is_over()`, none is left, or the time is `until`."""
        timers = self._timers
        while timers and timers[0][0] <= until and not is_over():
            at, _, timer = heapq.heappop(timers)
            callback = timer.callback
            if callback is not None:
                self.now = max(self.now, at)
                timer.callback = None
                callback()


TOKEN_ID = 7
_TOKEN, _NOTHING = SampledTokens((TOKEN_ID,)), SampledTokens()


class TimedStep(Struct, frozen=True, gc=False):
    """A step that lands at `due`, in seconds of the clock; only the caller waits."""

    outcome: StepResult
    due: float
    device_s: float

    def result(self) -> StepResult:
        """Return the outcome, whatever the time is."""
        return self.outcome


class TimedRunner:
    """Samples one token for each sequence that wants one.

    Attributes:
        device_s: Seconds that the device has computed for steps that have landed; the engine adds them.
    """

    max_steps_in_flight = 1

    def __init__(
        self, times: StepTimes, clock: VirtualClock, factors: tuple[list[float], list[float]], first: int = 0
    ) -> None:
        """Take the time from `clock`; step n takes its prediction times factor `first + n` of its kind, cyclically."""
        self._times = times
        self._clock = clock
        self._factors = factors
        self._first = first
        self._coldness = 0.0
        self.device_s = 0.0

    def submit(self, plan: StepPlan) -> TimedStep:
        """Begin a step now."""
        work = step_work(plan, self._coldness)
        self._coldness = work.coldness_after
        sampled = [_TOKEN] * work.num_decodes
        if plan.samples:
            sampled += [_TOKEN if samples else _NOTHING for samples in plan.samples]
        device_s, step_s = self._times.seconds(work)
        if factors := self._factors[1 if work.chunks else 0]:
            factor = factors[(self._first + plan.step) % len(factors)]
            device_s, step_s = device_s * factor, step_s * factor
        return TimedStep(StepResult(plan.step, sampled), self._clock.now + step_s, device_s)


class VirtualEngine(Engine):
    """The engine, whose steps land when the clock says so."""

    def __init__(
        self, config: SchedulerConfig, runner: TimedRunner, clock: VirtualClock, tiers: KvTiers | None = None
    ) -> None:
        super().__init__(Scheduler(config, tiers=tiers), runner, clock.time)
        self._timed = runner

    def submit(self) -> tuple[float, ScheduledStep] | None:
        """Begin a step; return when it is due, and what it computes. None if there is nothing to do."""
        if not self._submit_next() and not self._in_flight:
            return None
        flight = self._in_flight[-1]
        due = flight.pending.due if isinstance(flight.pending, TimedStep) else self._clock()
        return due, flight.step

    def land(self) -> list[SequenceEvent]:
        """Apply the step in flight, which is due."""
        pending = self._in_flight[0].pending
        if isinstance(pending, TimedStep):
            self._timed.device_s += pending.device_s
        return super().land()
