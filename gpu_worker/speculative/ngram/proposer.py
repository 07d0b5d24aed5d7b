"""Drafts by prompt lookup: a text goes on as it did where its last tokens occurred before.

Looks in the sequence's own prompt and output, and in the text that the client predicted. It pays wherever answers copy:
editing, summarising, code, retrieval. A long prompt is indexed over several steps, so that it delays none of them; what
has been indexed so far is found.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Values

from gpu_worker.core.batch_sequences import BatchSequence
from gpu_worker.core.draft import Draft
from gpu_worker.execution.drafts.proposer import ComputedTokens, DraftRequest

MATCH_TOKENS = 3
"""Tokens of a run; fewer find too much that goes on otherwise."""

BYTES_PER_TOKEN = 128
"""Memory of an index at most."""

MAX_INDEXED_TOKENS = 1024
"""Tokens that are indexed in a step at most, of all sequences."""

_PART_TOKENS = 4096
_TOKEN_BITS = 32
_RUN_MASK = (1 << MATCH_TOKENS * _TOKEN_BITS) - 1
_MAX_CANDIDATES = 16
_MAX_COMPARED = 32


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


class _Lookup:
    """The indexes of one sequence: of its own text, and of what the client predicted."""

    __slots__ = ("_indexes", "_sequence")

    def __init__(self, sequence: BatchSequence) -> None:
        self._sequence = sequence
        self._indexes = [RunIndex(sequence.token_ids)]
        if sequence.prediction:
            # First, since it is short and more likely to be copied.
            self._indexes.insert(0, RunIndex(sequence.prediction))

    @property
    def num_indexed(self) -> int:
        return sum(index.num_indexed for index in self._indexes)

    def extend(self, count: int) -> int:
        """Index at most `count` more tokens, and return how many."""
        num_new = 0
        for index in self._indexes:
            num_new += index.extend(count - num_new)
        return num_new

    def draft(self, count: int) -> tuple[int, ...]:
        """Return what followed the longest of the latest matches with the text's end, at most `count` tokens."""
        sequence = self._sequence
        text, prediction, num_output = sequence.token_ids, sequence.prediction, sequence.num_output_tokens
        # Too little output to look up: the prediction is expected from its beginning on.
        if (
            prediction
            and num_output < MATCH_TOKENS
            and prediction[:num_output] == tuple(text[len(text) - num_output :])
        ):
            return prediction[num_output : num_output + count]
        best: tuple[Values[int], int] | None = None
        best_length = num_candidates = 0
        for index in reversed(self._indexes):
            for place in index.ends(text[-MATCH_TOKENS:]) if len(text) >= MATCH_TOKENS else ():
                if index.text is text and place == len(text) - 1:
                    continue
                num_candidates += 1
                length = _match_length(index.text, place, text)
                if length > best_length:
                    best, best_length = (index.text, place), length
                if num_candidates >= _MAX_CANDIDATES or length >= _MAX_COMPARED:
                    break
        return () if best is None else _continuation(*best, count, goes_on=best[0] is text)


class NgramProposer:
    """Keeps the indexes of the batch's sequences; `num_left` more tokens may be indexed."""

    wants_hidden = False

    def __init__(self, max_tokens: int) -> None:
        self._lookups: dict[BatchSequence, _Lookup] = {}
        self.num_left = max_tokens

    def propose(self, requests: Values[DraftRequest]) -> list[Draft]:
        """Return what followed the longest earlier occurrence of each sequence's last tokens."""
        drafts, num_left = [], min(MAX_INDEXED_TOKENS, self.num_left)
        for request in requests:
            lookup = self._lookups.get(request.sequence)
            if lookup is None:
                lookup = self._lookups[request.sequence] = _Lookup(request.sequence)
            num_new = lookup.extend(num_left)
            num_left -= num_new
            self.num_left -= num_new
            drafts.append(Draft(lookup.draft(request.num_tokens)))
        return drafts

    def observe(self, computed: Iterable[ComputedTokens]) -> None:
        """Ignore it."""

    def forget(self, sequence: BatchSequence) -> None:
        """Drop a sequence's indexes."""
        lookup = self._lookups.pop(sequence, None)
        if lookup is not None:
            self.num_left += lookup.num_indexed


def _match_length(text: Values[int], place: int, own: Values[int]) -> int:
    """Count the tokens of `text` up to `place` that equal the last ones of `own`, which `MATCH_TOKENS` do."""
    end = len(own) - 1
    limit = min(place + 1, end + 1, _MAX_COMPARED)
    length = MATCH_TOKENS
    while length < limit and text[place - length] == own[end - length]:
        length += 1
    return length


def _continuation(text: Values[int], place: int, count: int, *, goes_on: bool) -> tuple[int, ...]:
    """Return the tokens behind `place`; behind the end of a text that goes on, those of the draft: it is in circles."""
    draft = list(text[place + 1 : place + 1 + count])
    while goes_on and len(draft) < count:
        draft.append(draft[place + 1 + len(draft) - len(text)])
    return tuple(draft)
