"""A worker with a simulated engine that one kind of request kills: what a bug in a kernel does to a real one.

`python -m tests.chaos.harness.poisoned_worker` is `python -m gpu_worker`, but a sequence with the poisonous seed ends
the process when it is to sample its first token.
"""

from __future__ import annotations

import os
import sys
from unittest import mock

from gpu_worker.__main__ import run
from gpu_worker.core.step import CompletedStep, StepPlan
from gpu_worker.execution.simulated_runner import SimulatedRunner

POISON_SEED = 666_013
EXIT_STATUS = 139  # as after a segmentation fault

_submit = SimulatedRunner.submit


def _submit_or_die(runner: SimulatedRunner, plan: StepPlan) -> CompletedStep:
    if any(item.samples and item.sequence.sampling.seed == POISON_SEED for item in plan.scheduled):
        os._exit(EXIT_STATUS)
    return _submit(runner, plan)


if __name__ == "__main__":
    with mock.patch.object(SimulatedRunner, "submit", _submit_or_die):
        sys.exit(run())
