"""A worker with a simulated engine that one kind of request kills: what a bug in a kernel does to a real one.

`python -m ops.chaos.poisoned_worker` is `python -m gpu_worker`, but a sequence with the poisonous seed ends
the process when it samples its first token, one with that seed plus n when it has n tokens,
and a prompt with the deadly text when it is read.
"""

from __future__ import annotations

import os
import sys
from typing import Any
from unittest import mock

from gpu_worker.__main__ import run
from gpu_worker.core.batch_sequences import BatchSequence
from gpu_worker.core.model_runner import PendingStep
from gpu_worker.core.plan import StepPlan
from gpu_worker.execution.simulated_runner import SimulatedRunner
from gpu_worker.text.prompt_encoder import PromptEncoder

POISON_SEED = 666_013
NUM_POISON_SEEDS = 1_000
DEADLY_TEXT = "who reads this dies"
EXIT_STATUS = 139  # as after a segmentation fault

_submit, _is_short = SimulatedRunner.submit, PromptEncoder.is_short


def _submit_or_die(runner: SimulatedRunner, plan: StepPlan) -> PendingStep:
    step = _submit(runner, plan)
    if any(item.samples and _is_deadly(item.sequence) for item in runner._sequences.shares(plan)):
        os._exit(EXIT_STATUS)
    return step


def _is_deadly(sequence: BatchSequence) -> bool:
    num_harmless = (sequence.sampling.seed or 0) - POISON_SEED
    num_tokens = len(sequence.token_ids) - sequence.num_prompt_tokens
    return 0 <= num_harmless < NUM_POISON_SEEDS and num_tokens >= num_harmless


def _read_or_die(encoder: PromptEncoder, prompt: Any) -> bool:
    if DEADLY_TEXT in str(prompt):
        os._exit(EXIT_STATUS)
    return _is_short(encoder, prompt)


if __name__ == "__main__":
    with (
        mock.patch.object(SimulatedRunner, "submit", _submit_or_die),
        mock.patch.object(PromptEncoder, "is_short", _read_or_die),
    ):
        sys.exit(run())
