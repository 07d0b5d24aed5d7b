"""Model runners that misbehave on purpose."""

import threading

from gpu_worker.core.scheduler import Scheduler, SchedulerConfig
from gpu_worker.core.step import CompletedStep, StepPlan
from gpu_worker.execution.simulated_runner import SimulatedRunner


def make_scheduler(max_num_seqs: int = 4, num_blocks: int = 64) -> Scheduler:
    return Scheduler(
        SchedulerConfig(
            block_size=4,
            num_blocks=num_blocks,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=32,
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
