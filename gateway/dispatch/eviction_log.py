"""Blocks that the attempts of one sequence have evicted by attention; the next attempt repeats the evictions.

Workers report them, and a worker may lie: only evictions that a request of this budget and length can have made are
kept, so the log takes fewer bytes than the tokens beside it.
"""

from __future__ import annotations

from array import array

from shared.kv_budget import EvictedBlocks, KvBudget

# Tokens that a worker may have computed and not sent yet.
_AHEAD = 4096


class EvictionLog:
    """Belongs to one flight."""

    def __init__(self) -> None:
        self._block_size = 0
        self._places = array("I")

    def add(self, told: EvictedBlocks, budget: KvBudget | None, num_tokens: int) -> bool:
        """Append the evictions of a delta; return False, without a change, if they are impossible.

        Args:
            told: An attempt that begins anew reports all of its own.
            budget: Of the request.
            num_tokens: Tokens of the prompt and of the output that are known.
        """
        if budget is None or budget.is_repeatable:
            return False
        num_known = len(self._places) if told.block_size == self._block_size else 0
        most = (num_tokens + _AHEAD) // told.block_size
        if told.first > num_known or told.first + len(told.places) > most:
            return False
        if max(told.places, default=0) >= budget.tokens // told.block_size:
            return False
        del self._places[told.first :]
        self._places.extend(told.places)
        self._block_size = told.block_size
        return True

    def told(self) -> EvictedBlocks:
        """Return all, for the next attempt."""
        return EvictedBlocks(self._block_size, tuple(self._places))
