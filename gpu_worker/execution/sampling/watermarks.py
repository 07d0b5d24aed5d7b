"""Which rows of logits are watermarked, and by which mark: from a key and the last tokens of the output.

A mark depends on the output so far, so a sequence has to wait for its last token (`needs_last_token`), and on nothing
else: not on the batch, the worker, the step, or whether a token was drafted. A context that the output has had already
is not marked again; its token is drawn with the request's seed, as the first `CONTEXT` tokens are.
"""

from __future__ import annotations

from collections.abc import Sequence as Values

import numpy as np
from msgspec import Struct

from gpu_worker.core.batch_sequences import BatchSequence
from gpu_worker.execution.batch.assembled_step import SampledRows
from gpu_worker.execution.batch.transfers import Int64s
from shared.watermark import CONTEXT, mark_of

Context = tuple[int, ...]


class _Marked(Struct, gc=False):
    """A sequence with a watermark.

    Attributes:
        firsts: The contexts of its output, each with the place in the output of the token that it was first before.
        num_read: Places in the output whose contexts are among these.
    """

    sequence: BatchSequence
    key: bytes
    firsts: dict[Context, int]
    num_read: int = CONTEXT


class Watermarks:
    """Keeps the contexts of the sequence in each row that has a watermark."""

    def __init__(self) -> None:
        self._rows: dict[int, _Marked] = {}

    def assign(self, row: int, sequence: BatchSequence) -> None:
        """Begin with a sequence that was given a row and has a watermark."""
        key = sequence.sampling.watermark
        assert key is not None
        self._rows[row] = _Marked(sequence, bytes.fromhex(key), {})

    def marks(self, sampled: SampledRows, places: Int64s) -> Int64s:
        """Return the marks of rows of logits, of which those at `places` have a watermark; 0 of the others."""
        marks = np.zeros(len(sampled.rows), dtype=np.int64)
        for place in places.tolist():
            path = () if sampled.paths is None else sampled.paths[place]
            marks[place] = _mark(self._rows[int(sampled.rows[place])], path)
        return marks


def _mark(marked: _Marked, path: Values[int]) -> int:
    """Return the mark of the token behind the known output and these drafts; 0 for none."""
    sequence, firsts = marked.sequence, marked.firsts
    token_ids, start = sequence.token_ids, sequence.num_prompt_tokens
    num_known = len(token_ids) - start
    for place in range(marked.num_read, num_known):
        firsts.setdefault(tuple(token_ids[start + place - CONTEXT : start + place]), place)
    marked.num_read = max(marked.num_read, num_known)
    place = num_known + len(path)
    if place < CONTEXT:
        return 0
    # Of the drafts' contexts too, the first counts: all that end behind the last known token.
    tail = (*token_ids[max(start, len(token_ids) - CONTEXT) :], *path)
    context = tail[-CONTEXT:]
    num_later = len(tail) - CONTEXT
    is_repeated = firsts.get(context, place) < place or any(
        tail[offset : offset + CONTEXT] == context for offset in range(num_later)
    )
    return 0 if is_repeated else mark_of(marked.key, context)
