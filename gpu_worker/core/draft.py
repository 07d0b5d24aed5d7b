"""Draft tokens of a sequence: all of them are verified in one step.

The step computes them behind the sequence's last token; *row* 0 of its results for the sequence belongs to that token,
row `i + 1` to draft token `i`.
"""

from __future__ import annotations

from collections.abc import Sequence as Values

from msgspec import Struct

MAX_DRAFT_TOKENS = 63
"""Of a draft: steps with more query tokens a sequence are prompts to the attention kernels."""


class Draft(Struct, frozen=True, gc=False):
    """Draft tokens, each following the one before."""

    token_ids: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.token_ids)

    def first(self, count: int) -> Draft:
        """Return the first `count` draft tokens."""
        return self if count >= len(self.token_ids) else Draft(self.token_ids[:count])

    def valid(self, vocab_size: int) -> Draft:
        """Return the draft tokens before the first that is not in the vocabulary or is too many."""
        for number, token_id in enumerate(self.token_ids):
            if number == MAX_DRAFT_TOKENS or not 0 <= token_id < vocab_size:
                return self.first(number)
        return self

    def paths(self) -> list[tuple[int, ...]]:
        """Return for each row the draft tokens that stand before it."""
        return [self.token_ids[:count] for count in range(len(self.token_ids) + 1)]

    def num_accepted(self, sampled: Values[int]) -> int:
        """Return how many draft tokens equal the token sampled at the row before them, up to the first mismatch."""
        for number, token_id in enumerate(self.token_ids):
            if sampled[number] != token_id:
                return number
        return len(self.token_ids)


NO_DRAFT = Draft()
