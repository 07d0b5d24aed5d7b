"""A request's budget in blocks: how many its sequence holds, and how many leave at once when these are full.

Blocks leave just before the token is computed for which there is no room, however the tokens were divided into steps.
With the policy `sinks`, what a token sees is a function of its place in the sequence, of the budget and of the block
size.

With a policy by scores, those leave that get least attention (`BlockScores`). Only tokens of the block that fills a
budget are asked how they attend, so who is asked depends on the place in the text alone. Decisions are recorded: when
the sequence is computed again, here or on another worker, it repeats them, and tokens see what they saw. Later
decisions depend on numbers that were computed again.

Source: Zhang et al., arXiv 2306.14048 (heavy hitters); Liu et al., arXiv 2305.17118, algorithm 2 (persistence). They
score single tokens of each head by all queries; here blocks are scored by some queries, over all layers and heads that
the answering rank has: all of the model's where there is one rank. The first paper adds up over a token's life: only
the last queries count here, by which less is lost.
"""

from __future__ import annotations

from collections.abc import Sequence as Values
from dataclasses import dataclass
from itertools import zip_longest
from operator import lt

from shared.errors import BadRequestError
from shared.kv_budget import EvictedBlocks, KvBudget, KvPolicy

MIN_BLOCKS = 4
_EVICTED_SHARE = 8


@dataclass(frozen=True, slots=True)
class BlockBudget:
    """Blocks of a sequence that evicts.

    Attributes:
        num_blocks: That it holds at most.
        num_sinks: The first ones, which stay.
        num_evicted: That leave at once.
        policy: Which ones leave.
        num_recent: The last ones, which stay whatever attention they get.
    """

    num_blocks: int
    num_sinks: int
    num_evicted: int
    block_size: int
    policy: KvPolicy = "sinks"
    num_recent: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens that it keeps at most."""
        return self.num_blocks * self.block_size

    @property
    def is_scored(self) -> bool:
        """Whether blocks leave by the attention that they get."""
        return self.policy != "sinks"

    @property
    def scored_from(self) -> int | None:
        """From which place in the cache on it is asked how tokens attend; None where that does not matter."""
        return self.num_tokens - self.block_size if self.is_scored else None

    def num_evicted_tokens(self, num_computed: int) -> int:
        """Return how many tokens have left when this many are computed."""
        each = self.num_evicted * self.block_size
        return -(-max(0, num_computed - self.num_tokens) // each) * each

    def can_have_evicted(self, places: Values[int], num_tokens: int) -> bool:
        """Return whether the evictions of a text of this many tokens can have had these places, one behind the other.

        How many there are is looked at first, so that too many cost nothing.
        """
        count = self.num_evicted
        if len(places) % count or len(places) * self.block_size > self.num_evicted_tokens(num_tokens):
            return False
        if places and (min(places) < self.num_sinks or max(places) >= self.num_blocks):
            return False
        return all(all(map(lt, places[place - 1 :: count], places[place::count])) for place in range(1, count))

    def evicted_places(self) -> range:
        """Return which blocks of a full table leave with `sinks`, by their places: the oldest behind these."""
        return range(self.num_sinks, self.num_sinks + self.num_evicted)


def block_budget(budget: KvBudget, block_size: int, max_num_blocks: int) -> BlockBudget:
    """Return a budget in blocks of `block_size` tokens, of which a sequence may have `max_num_blocks`.

    Raises:
        BadRequestError: It is smaller than `MIN_BLOCKS` blocks, or larger than the model's context.
    """
    num_blocks, least, most = budget.tokens // block_size, MIN_BLOCKS * block_size, max_num_blocks * block_size
    if num_blocks < MIN_BLOCKS or num_blocks > max_num_blocks:
        allowed = f"it must be {least} to {most} here" if least <= most else "no budget fits into the context here"
        raise BadRequestError(f"kv_budget.tokens is {budget.tokens}, but {allowed}.", "kv_budget")
    num_evicted = max(1, num_blocks // _EVICTED_SHARE)
    num_recent = 0 if budget.is_repeatable else num_blocks // 2
    return BlockBudget(num_blocks, 1, num_evicted, block_size, budget.policy, num_recent)


class BlockScores:
    """How much attention the blocks of one sequence got, and which of them are evicted for it."""

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
