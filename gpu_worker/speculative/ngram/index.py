"""Where the runs of tokens of a text occurred before."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from collections.abc import Sequence as Values

MATCH_TOKENS = 3
"""Tokens of a run; fewer find too much that goes on otherwise."""

BYTES_PER_TOKEN = 128
"""Memory of an index at most."""

_PART_TOKENS = 4096
_TOKEN_BITS = 32
_RUN_MASK = (1 << MATCH_TOKENS * _TOKEN_BITS) - 1


class RunIndex:
    """Finds the ends of runs of `MATCH_TOKENS` tokens in a text that only grows.

    Reads the text where it is, and takes it in a piece at a time: what it has not taken in yet is not found. The table
    consists of parts, since a large one takes long to grow.
    """

    __slots__ = ("_parts", "_previous", "_run", "text")

    def __init__(self, text: Values[int]) -> None:
        self.text = text
        # The latest place where each run ends, among `_PART_TOKENS` places.
        self._parts: list[dict[int, int]] = []
        # For each place the one before where the same run ends, in the same part; -1 where there is none.
        self._previous = array("i")
        self._run = 0

    @property
    def num_indexed(self) -> int:
        """Tokens that were taken in."""
        return len(self._previous)

    def extend(self, count: int) -> int:
        """Index at most `count` more tokens, and return how many."""
        previous, run, first = self._previous, self._run, len(self._previous)
        new = self.text[first : first + count]
        for place, token_id in enumerate(new, start=first):
            if place % _PART_TOKENS == 0:
                self._parts.append({})
            latest = self._parts[-1]
            run = (run << _TOKEN_BITS | token_id) & _RUN_MASK
            previous.append(latest.get(run, -1))
            if place >= MATCH_TOKENS - 1:
                latest[run] = place
        self._run = run
        return len(new)

    def ends(self, token_ids: Values[int]) -> Iterator[int]:
        """Return the places where a run of these `MATCH_TOKENS` tokens ends, the latest first."""
        run = 0
        for token_id in token_ids:
            run = run << _TOKEN_BITS | token_id
        for latest in reversed(self._parts):
            place = latest.get(run, -1)
            while place >= 0:
                yield place
                place = self._previous[place]
