"""Guesses that a text goes on as it did where its last tokens occurred before (prompt lookup).

Looks in the sequence's own prompt and output, and in the text that the client predicted. Costs nothing but this
look-up, so it pays wherever answers copy: editing, summarising, code, retrieval.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Values

from gpu_worker.core.draft import Draft
from gpu_worker.core.sequence import Sequence
from gpu_worker.execution.drafts.proposer import ComputedTokens, DraftRequest

MATCH_TOKENS = 3
"""Last tokens that have to be found; fewer find too much that goes on otherwise."""

_MAX_CANDIDATES = 16
_MAX_COMPARED = 32
_GAP = -1


class TextIndex:
    """Where each run of `MATCH_TOKENS` tokens of a growing text ends. A token costs one entry, whatever the length.

    Texts that came before are separated from it by a gap, which matches nothing and ends a guess.
    """

    __slots__ = ("_latest", "_previous", "_text")

    def __init__(self, before: tuple[int, ...]) -> None:
        """Start with the text `before`, which guesses may be taken from."""
        self._text: list[int] = []
        self._latest: dict[tuple[int, ...], int] = {}
        # Where the run that ends at a place ended last before; -1 where it is new.
        self._previous: list[int] = []
        if before:
            self.extend((*before, _GAP))

    def extend(self, token_ids: Values[int]) -> None:
        """Add tokens to the end of the text."""
        text, latest, previous = self._text, self._latest, self._previous
        first = len(text)
        text += token_ids
        for end in range(first, len(text)):
            run = tuple(text[max(0, end + 1 - MATCH_TOKENS) : end + 1])
            previous.append(latest.get(run, -1))
            latest[run] = end

    def continuation(self, count: int) -> tuple[int, ...]:
        """Return what followed the longest of the latest places that end like the text, at most `count` tokens."""
        text = self._text
        end = len(text) - 1
        if end < MATCH_TOKENS or _GAP in text[end + 1 - MATCH_TOKENS :]:
            return ()
        best, best_length = -1, 0
        place = self._previous[end]
        for _ in range(_MAX_CANDIDATES):
            if place < 0:
                break
            length = self._match_length(place, end)
            if length > best_length:
                best, best_length = place, length
            if length >= _MAX_COMPARED:
                break
            place = self._previous[place]
        return self._follow(best, count) if best >= 0 else ()

    def _match_length(self, place: int, end: int) -> int:
        """Count the tokens up to `place` that equal those up to `end`."""
        text = self._text
        limit = min(place + 1, _MAX_COMPARED)
        length = MATCH_TOKENS
        while length < limit and text[place - length] == text[end - length] != _GAP:
            length += 1
        return length

    def _follow(self, place: int, count: int) -> tuple[int, ...]:
        """Return the tokens behind `place`, and where the text ends, go on with the guess itself: a text in circles."""
        text = self._text
        guess: list[int] = []
        for source in range(place + 1, place + 1 + count):
            token_id = text[source] if source < len(text) else guess[source - len(text)]
            if token_id == _GAP:
                break
            guess.append(token_id)
        return tuple(guess)


class _Lookup:
    """One sequence's index, and how many of its tokens are in it."""

    __slots__ = ("index", "num_seen")

    def __init__(self, sequence: Sequence) -> None:
        self.index = TextIndex(sequence.prediction)
        self.num_seen = 0

    def guess(self, sequence: Sequence, count: int) -> tuple[int, ...]:
        self.index.extend(sequence.token_ids[self.num_seen :])
        self.num_seen = len(sequence.token_ids)
        num_output = sequence.num_output_tokens
        if num_output < MATCH_TOKENS and sequence.prediction:
            # Too little to look up: the prediction is expected from its beginning on.
            output = tuple(sequence.token_ids[sequence.num_prompt_tokens :])
            if sequence.prediction[:num_output] == output:
                return sequence.prediction[num_output : num_output + count]
        return self.index.continuation(count)


class NgramProposer:
    """Keeps an index for each sequence of the batch."""

    wants_hidden = False

    def __init__(self) -> None:
        """Know no sequence."""
        self._lookups: dict[Sequence, _Lookup] = {}

    def propose(self, requests: Values[DraftRequest]) -> list[Draft]:
        """Return what followed the longest earlier occurrence of each sequence's last tokens."""
        return [Draft(self._guess(request.sequence, request.num_tokens)) for request in requests]

    def observe(self, computed: Iterable[ComputedTokens]) -> None:
        """Ignore it."""

    def forget(self, sequence: Sequence) -> None:
        """Drop a sequence's index."""
        self._lookups.pop(sequence, None)

    def _guess(self, sequence: Sequence, count: int) -> tuple[int, ...]:
        lookup = self._lookups.get(sequence)
        if lookup is None:
            lookup = self._lookups[sequence] = _Lookup(sequence)
        return lookup.guess(sequence, count)
