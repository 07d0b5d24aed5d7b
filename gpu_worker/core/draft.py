"""Draft tokens of a sequence, as a tree: all of them are verified in one step.

Draft tokens are numbered so that each comes behind its parent. The step computes them in this order behind the
sequence's last token; *row* 0 of the step's results for the sequence belongs to that token, row `i + 1` to draft
token `i`.
"""

from __future__ import annotations

from collections.abc import Sequence as Values

from msgspec import Struct

ROOT = -1
"""Parent of the draft tokens that follow the sequence's last token."""

MAX_DRAFT_TOKENS = 63
"""Of a draft, so that what a token sees fits into the bits of a mask."""

SEES_ALL = -1
"""Mask of a token that sees all before it."""


class Draft(Struct, frozen=True, gc=False):
    """A tree of draft tokens.

    Attributes:
        token_ids: The tokens.
        parents: For each the number of the one that it follows, smaller than its own, or `ROOT`; None is a chain, each
            following the one before.
    """

    token_ids: tuple[int, ...] = ()
    parents: tuple[int, ...] | None = None

    def __len__(self) -> int:
        """Return the number of draft tokens."""
        return len(self.token_ids)

    def first(self, count: int) -> Draft:
        """Return the first `count` draft tokens."""
        if count >= len(self.token_ids):
            return self
        return Draft(self.token_ids[:count], None if self.parents is None else self.parents[:count])

    def valid(self, vocab_size: int) -> Draft:
        """Return the draft tokens before the first that is not in the vocabulary, has no parent, or is too many."""
        parents = self.parents
        if parents is not None and len(parents) != len(self.token_ids):
            return Draft()
        for number, token_id in enumerate(self.token_ids[: MAX_DRAFT_TOKENS + 1]):
            parent = number - 1 if parents is None else parents[number]
            if number == MAX_DRAFT_TOKENS or not 0 <= token_id < vocab_size or not ROOT <= parent < number:
                return self.first(number)
        return self

    def only(self, is_kept: Values[bool]) -> Draft:
        """Return the draft tokens that are kept, as those are before them."""
        if all(is_kept):
            return self
        if self.parents is None:
            return self.first(is_kept.index(False))
        numbers = {ROOT: ROOT}
        for number, parent in enumerate(self.parents):
            if is_kept[number] and parent in numbers:
                numbers[number] = len(numbers) - 1
        kept = [number for number in numbers if number != ROOT]
        token_ids = tuple(self.token_ids[number] for number in kept)
        return Draft(token_ids, tuple(numbers[self.parents[number]] for number in kept))

    def chain(self) -> Draft:
        """Return the first draft token, the first that follows it, and so on."""
        if self.parents is None:
            return self
        kept: list[int] = []
        last = ROOT
        for number, parent in enumerate(self.parents):
            if parent == last:
                kept.append(self.token_ids[number])
                last = number
        return Draft(tuple(kept))

    def depths(self) -> tuple[int, ...]:
        """Return how many tokens behind the sequence's last one each draft token is, from 1."""
        if self.parents is None:
            return tuple(range(1, len(self.token_ids) + 1))
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent == ROOT else depths[parent] + 1)
        return tuple(depths)

    def paths(self) -> list[tuple[int, ...]]:
        """Return for each row the draft tokens, as token ids, that lead to it and are taken for right there."""
        if self.parents is None:
            return [self.token_ids[:count] for count in range(len(self.token_ids) + 1)]
        paths: list[tuple[int, ...]] = [()]
        for token_id, parent in zip(self.token_ids, self.parents, strict=True):
            paths.append((*paths[parent + 1], token_id))
        return paths

    def masks(self) -> list[int]:
        """Return for each row what it sees, as signed 64 bits: bit `i` is the token that lies `i` before it.

        What lies further off is seen.
        """
        if self.parents is None:
            return [SEES_ALL] * (len(self.token_ids) + 1)
        masks = [SEES_ALL]
        for number, parent in enumerate(self.parents):
            # Itself, then those between it and its parent, which it does not see, then what the parent sees.
            distance = number - parent
            mask = (masks[parent + 1] << distance | 1) & (1 << 64) - 1
            masks.append(mask - (1 << 64) if mask >> 63 else mask)
        return masks

    def accepted(self, sampled: Values[int]) -> tuple[int, ...]:
        """Return the numbers of the draft tokens that are accepted: those that were sampled at the row before them.

        Args:
            sampled: The token of each row.
        """
        if self.parents is None:
            for number, token_id in enumerate(self.token_ids):
                if sampled[number] != token_id:
                    return tuple(range(number))
            return tuple(range(len(self.token_ids)))
        path: list[int] = []
        last = ROOT
        for number, (token_id, parent) in enumerate(zip(self.token_ids, self.parents, strict=True)):
            if parent == last and sampled[last + 1] == token_id:
                path.append(number)
                last = number
        return tuple(path)


NO_DRAFT = Draft()
