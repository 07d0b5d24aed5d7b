"""Model runners that misbehave on purpose, or run behind like a device."""

import threading
from collections.abc import Callable, Set
from dataclasses import dataclass

from gpu_worker.core.batch_sequences import BatchSequences
from gpu_worker.core.plan import StepPlan
from gpu_worker.core.scheduler import Scheduler
from gpu_worker.core.scheduler_config import SchedulerConfig
from gpu_worker.core.step import CompletedStep, StepResult
from gpu_worker.execution.simulated_runner import SimulatedRunner
from tests.gpu_worker.core.paged_oracle import OracleRunner, OracleStep


def make_scheduler(max_num_seqs: int = 4, num_blocks: int = 64, max_num_batched_tokens: int = 32) -> Scheduler:
    return Scheduler(
        SchedulerConfig(
            block_size=4,
            num_blocks=num_blocks,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=200,
        )
    )


class BrokenRunner:
    """Raises in the steps whose numbers are listed (all, when None), counting executions from 1."""

    max_steps_in_flight = 1

    def __init__(self, broken: set[int] | None = None) -> None:
        self.broken = broken
        self.num_executions = 0
        self._working = SimulatedRunner(0, range(10, 20))

    def submit(self, plan: StepPlan) -> CompletedStep:
        self.num_executions += 1
        if self.broken is None or self.num_executions in self.broken:
            raise RuntimeError("device lost")
        return self._working.submit(plan)


class PoisonedRunner:
    """Raises in every step that computes one of these sequences, from `from_length` tokens on."""

    max_steps_in_flight = 1

    def __init__(self, poisoned: Set[str], from_length: int = 0) -> None:
        self.poisoned = poisoned
        self.from_length = from_length
        self._sequences = BatchSequences()
        self._working = SimulatedRunner(0, range(10, 20))

    def submit(self, plan: StepPlan) -> CompletedStep:
        self._sequences.apply(plan)
        for item in self._sequences.shares(plan):
            if item.sequence.id in self.poisoned and item.start + item.num_tokens >= self.from_length:
                raise RuntimeError("poisoned")
        return self._working.submit(plan)


class GatedRunner:
    """Blocks inside each step until the test lets it go on."""

    max_steps_in_flight = 1

    def __init__(self) -> None:
        self.entered = threading.Semaphore(0)
        self.gate = threading.Semaphore(0)
        self._working = SimulatedRunner(0, range(10, 20))

    def submit(self, plan: StepPlan) -> CompletedStep:
        self.entered.release()
        assert self.gate.acquire(timeout=10)
        return self._working.submit(plan)


@dataclass
class LateStep:
    """A step whose result a function makes when it is asked for."""

    result: Callable[[], StepResult]


class LateRunner:
    """The oracle, running behind; refuses some submissions and loses some results.

    Args:
        refused, lost: Step numbers.
        poisoned: Ids of sequences whose steps all are lost or, where the number of the step is even, refused.
    """

    def __init__(
        self,
        max_steps_in_flight: int = 2,
        refused: Set[int] = frozenset(),
        lost: Set[int] = frozenset(),
        poisoned: Set[str] = frozenset(),
    ) -> None:
        self.max_steps_in_flight = max_steps_in_flight
        self.refused = refused
        self.lost = lost
        self.poisoned = poisoned
        self._sequences = BatchSequences()
        self.log: list[str] = []
        self.oracle = OracleRunner(4, 23)

    def submit(self, plan: StepPlan) -> LateStep:
        self.log.append(f"submit {plan.step}")
        step = self.oracle.submit(plan)
        self._sequences.apply(plan)
        is_poisoned = any(sequence.id in self.poisoned for sequence in self._sequences.of(plan.rows))
        if plan.step in self.refused or (is_poisoned and plan.step % 2 == 0):
            step.lose()
            raise RuntimeError("out of memory")
        return LateStep(lambda: self._result(plan.step, step, is_poisoned))

    def _result(self, number: int, step: OracleStep, is_poisoned: bool) -> StepResult:
        self.log.append(f"result {number}")
        if is_poisoned or number in self.lost:
            step.lose()
            raise RuntimeError("device lost")
        return step.result()


class GatedLateRunner(LateRunner):
    """Waits for each result until the test lets it go on."""

    def __init__(self) -> None:
        super().__init__()
        self.entered = threading.Semaphore(0)
        self.gate = threading.Semaphore(0)

    def _result(self, number: int, step: OracleStep, is_poisoned: bool) -> StepResult:
        self.entered.release()
        assert self.gate.acquire(timeout=10)
        return super()._result(number, step, is_poisoned)


class PacedRunner:
    """A device of one stream: steps take `step_s` each, one after the other, while the host goes on."""

    max_steps_in_flight = 2

    def __init__(self, step_s: float) -> None:
        self.now = 0.0
        self._step_s = step_s
        self._free_at = 0.0
        self._working = SimulatedRunner(0, range(10, 20))

    def submit(self, plan: StepPlan) -> LateStep:
        done_at = self._free_at = max(self.now, self._free_at) + self._step_s
        outcome = self._working.submit(plan).result()

        def result() -> StepResult:
            self.now = max(self.now, done_at)
            return outcome

        return LateStep(result)
