"""How many slots the states of recurrent layers get, and how far apart checkpoints are. Without torch."""

from __future__ import annotations

from gpu_worker.core.scheduler_config import StateConfig

_LEAST_CHECKPOINTS = 8

CHECKPOINT_TOKENS = 1024
"""Between checkpoints along a prompt, about: computing so many tokens again costs less than what a state displaces."""


def state_config(max_num_seqs: int, block_size: int) -> StateConfig:
    """Return what the scheduler is to know of the slots."""
    interval = max(1, CHECKPOINT_TOKENS // block_size)
    return StateConfig(num_state_slots(max_num_seqs), 1 << (interval.bit_length() - 1))


def num_state_slots(max_num_seqs: int) -> int:
    """Return the slots of a model with recurrent layers: one a sequence, half as many for checkpoints, at least 8."""
    return max_num_seqs + max(_LEAST_CHECKPOINTS, max_num_seqs // 2)
