"""A request's budget in blocks: how many its sequence holds, and how many leave at once when these are full.

Blocks leave just before the token is computed for which there is no room, however the tokens were divided into steps.
With the policy `sinks`, what a token sees is a function of its place in the sequence, of the budget and of the block
size.
"""

from __future__ import annotations

from collections.abc import Sequence as Values
from dataclasses import dataclass
from operator import lt

from shared.errors import BadRequestError
from shared.kv_budget import KvBudget, KvPolicy

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
