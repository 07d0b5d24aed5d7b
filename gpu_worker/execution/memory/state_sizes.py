"""How many slots the states of recurrent layers get, and how far apart checkpoints are. Without torch.

Each running sequence has a slot; the others are checkpoints, from which sequences with a known prefix start. A few are
always there. The rest are a share of the cache's memory, because both serve prefixes alike: what blocks remember can be
used only where a checkpoint is near.
"""

from __future__ import annotations

from fractions import Fraction

from gpu_worker.core.scheduler_config import StateConfig

_LEAST_CHECKPOINTS = 8

CHECKPOINT_TOKENS = 1024
"""Tokens between checkpoints along a prompt, about: recomputing them costs less than the blocks a state displaces."""


def state_config(num_slots: int, block_size: int) -> StateConfig:
    """Return what the scheduler is to know of the slots."""
    interval = max(1, CHECKPOINT_TOKENS // block_size)
    return StateConfig(num_slots, 1 << (interval.bit_length() - 1))


def num_sure_slots(max_num_seqs: int, *, has_blocks: bool) -> int:
    """Return the slots that there are however large the cache is: one a sequence, and 8 checkpoints.

    Where no layer keeps tokens there is no cache to take a share of: there are half as many checkpoints as sequences.
    """
    least = _LEAST_CHECKPOINTS if has_blocks else max(_LEAST_CHECKPOINTS, max_num_seqs // 2)
    return max_num_seqs + least


def checkpoints_a_block(ratio: float, block_bytes: int, slot_bytes: int) -> Fraction:
    """Return how many checkpoints there are for each block, one at most.

    Args:
        ratio: Bytes of checkpoints for each byte of blocks.
        block_bytes: Of a block that keeps all tokens, with what other groups of tokens have beside it.
        slot_bytes: Of a state, 0 in models without.
    """
    if slot_bytes == 0:
        return Fraction(0)
    return min(Fraction(1), Fraction(ratio).limit_denominator(1000) * block_bytes / slot_bytes)
