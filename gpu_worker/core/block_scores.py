"""How much attention the blocks of a sequence get, and which of them leave for it.

Only tokens of the block that fills a budget are asked how they attend, so who is asked depends on the place in the text
alone. Decisions are recorded: when the sequence is computed again, here or on another worker, it
repeats them, and tokens see what they saw. Later decisions depend on numbers that were computed again.

Source: Zhang et al., arXiv 2306.14048 (heavy hitters); Liu et al., arXiv 2305.17118, algorithm 2 (persistence). They
score single tokens of each head by all queries; here blocks are scored by some queries, over all
layers and heads that the answering rank has: all of the model's where there is one rank. The first paper adds up over a
token's life: only the last queries count here, by which less is lost.
"""

from __future__ import annotations

from collections.abc import Sequence as Values
from itertools import zip_longest

from gpu_worker.core.block_budget import BlockBudget
from shared.kv_budget import EvictedBlocks


class BlockScores:
    """Belongs to one sequence."""

    def __init__(self, budget: BlockBudget, evicted: Values[int] = ()) -> None:
        """Score for a budget; `evicted` are the places of earlier attempts' evictions, one behind the other."""
        self._evicted = list(evicted)
        self._budget = budget
        # Since the last eviction, and how often it was more than the mean before.
        self._attention: list[float] = []
        self._counts: list[float] = []

    @property
    def decisions(self) -> list[tuple[int, ...]]:
        """Of each eviction, the places of the blocks that left; at first those of earlier attempts."""
        count = self._budget.num_evicted
        return [tuple(self._evicted[first : first + count]) for first in range(0, len(self._evicted), count)]

    def add(self, attention: Values[float]) -> None:
        """Add how much attention some tokens paid to each block."""
        self._attention = [sum(pair) for pair in zip_longest(self._attention, attention, fillvalue=0.0)]

    def places(self, number: int) -> tuple[int, ...]:
        """Return which blocks of the full table eviction `number` evicts, in order."""
        budget = self._budget
        first = number * budget.num_evicted
        if first < len(self._evicted):
            return tuple(self._evicted[first : first + budget.num_evicted])
        scores = self._scores()
        candidates = range(budget.num_sinks, budget.num_blocks - budget.num_recent)
        # Of equal ones the oldest leave.
        return tuple(sorted(sorted(candidates, key=lambda place: scores[place])[: budget.num_evicted]))

    def evict(self, number: int, places: tuple[int, ...]) -> None:
        """Let the blocks at these places leave, in eviction `number`."""
        if number * self._budget.num_evicted == len(self._evicted):
            self._evicted += places
        self._counts = [score for place, score in enumerate(self._scores()) if place not in places]
        self._attention = []

    def told(self, first: int) -> EvictedBlocks | None:
        """Return the decisions from number `first` on; None where there are none."""
        begin = first * self._budget.num_evicted
        if begin >= len(self._evicted):
            return None
        return EvictedBlocks(self._budget.block_size, tuple(self._evicted[begin:]), begin)

    def reset(self) -> None:
        """Forget the scores, because the sequence is computed again."""
        self._attention, self._counts = [], []

    def _scores(self) -> list[float]:
        # Blocks that were not reported count as zero; reports beyond the table are ignored.
        count = self._budget.num_blocks
        attention = [*self._attention, *[0.0] * count][:count]
        if self._budget.policy == "heavy_hitters":
            return attention
        mean = sum(attention) / count
        counts = [*self._counts, *[0] * (count - len(self._counts))]
        return [before + (paid > mean) for before, paid in zip(counts, attention, strict=True)]
