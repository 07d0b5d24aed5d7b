"""A bound on the memory of one sequence: how many of its tokens stay in the KV cache, and which ones."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from shared.bounds import MAX_PROMPT_TOKENS

KvPolicy = Literal["sinks", "heavy_hitters", "persistence"]
MAX_BUDGETED_TOKENS = MAX_PROMPT_TOKENS
"""Tokens of a sequence with a budget at most, prompt and output together: as many as a resumed request can carry."""

NumBudgetTokens = Annotated[int, Meta(ge=1, le=MAX_PROMPT_TOKENS)]
_NumBlocks = Annotated[int, Meta(ge=0, le=MAX_BUDGETED_TOKENS)]
_BlockSize = Annotated[int, Meta(ge=1, le=MAX_BUDGETED_TOKENS)]


class KvBudget(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """What a request allows the KV cache to keep of it.

    Attributes:
        tokens: Kept at most; the others are evicted, and the answer does not see them any more.
        policy: Which tokens stay. `sinks`: the first ones, and the last ones. The others keep these too, and between
            them what got the most attention (`heavy_hitters`), or more than its share most often (`persistence`).
    """

    tokens: NumBudgetTokens
    policy: KvPolicy = "sinks"

    @property
    def is_repeatable(self) -> bool:
        """Whether the evicted blocks depend on the tokens alone, and not on computed numbers."""
        return self.policy == "sinks"


class EvictedBlocks(Struct, frozen=True, array_like=True):
    """The evictions of a request whose policy goes by attention: another attempt repeats them.

    Attributes:
        block_size: Tokens of a block; an attempt with blocks of another size cannot repeat them.
        places: The places of evicted blocks in the full block table, one eviction behind the other.
        first: How many places came in earlier messages.
    """

    block_size: _BlockSize
    places: Annotated[tuple[_NumBlocks, ...], Meta(max_length=MAX_BUDGETED_TOKENS)]
    first: _NumBlocks = 0

    def __post_init__(self) -> None:
        most = MAX_BUDGETED_TOKENS // self.block_size
        if self.first + len(self.places) > most:
            raise ValueError(f"evicted: no text has more than {most} blocks of {self.block_size} tokens.")
