"""A runner that computes nothing and says when a step is due in virtual time.

`gpu_worker.execution.simulated_runner` paces a real worker by the wall clock and answers whatever a request may ask
for. This one only has to be cheap: it knows no sequences, and every token is the same.
"""

from __future__ import annotations

from msgspec import Struct

from gpu_worker.core.plan import StepPlan
from gpu_worker.core.step import SampledTokens, StepResult
from ops.simulation.clock import VirtualClock
from ops.simulation.step_time import StepTimes

TOKEN_ID = 7
_TOKEN, _NOTHING = SampledTokens((TOKEN_ID,)), SampledTokens()


class TimedStep(Struct, frozen=True, gc=False):
    """A step that is done at `due`, in seconds of the clock; only the caller waits."""

    outcome: StepResult
    due: float
    device_s: float

    def result(self) -> StepResult:
        """Return the outcome, whatever the time is."""
        return self.outcome


class TimedRunner:
    """Samples one token for each sequence that wants one.

    How a step differs from its prediction depends on its number alone: steps that are looked at ahead are the same.

    Attributes:
        device_s: Seconds that the device has computed for steps that have landed; the engine adds them.
    """

    max_steps_in_flight = 1

    def __init__(self, times: StepTimes, clock: VirtualClock, factors: list[float], first: int = 0) -> None:
        """Take the time from `clock`; steps differ from their prediction by `factors`, from place `first` on."""
        self._times = times
        self._clock = clock
        self._factors = factors
        self._first = first
        self.device_s = 0.0

    def submit(self, plan: StepPlan) -> TimedStep:
        """Begin a step now."""
        num_decodes = plan.num_decodes
        context = sum(plan.starts[:num_decodes]) + num_decodes
        chunks = list(zip(plan.starts[num_decodes:], plan.lengths, strict=True)) if plan.lengths else []
        sampled = [_TOKEN] * num_decodes
        if plan.samples:
            sampled += [_TOKEN if samples else _NOTHING for samples in plan.samples]
        device_s, step_s = self.seconds(plan.step, num_decodes, context, chunks)
        return TimedStep(StepResult(plan.step, sampled), self._clock.now + step_s, device_s)

    def seconds(
        self, number: int, num_decodes: int, num_context: int, chunks: list[tuple[int, int]]
    ) -> tuple[float, float]:
        """Return the device's seconds of step number `number`, and those until the next one can begin."""
        factor = self._factors[(self._first + number) % len(self._factors)] if self._factors else 1.0
        return self._times.seconds(factor, num_decodes, num_context, chunks)
