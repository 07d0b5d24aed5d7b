"""Which recurrent state each sequence of a step goes on from, and how much of the step it is to remember."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch


@dataclass(frozen=True, slots=True)
class StateRows:
    """The sequences of a step, as kernels with a state take them.

    Tokens of all sequences are laid end to end. A sequence whose tokens are its first ones begins with a state of
    zeros, whatever its slot holds: nobody has to clear slots. Sequences of padding have a context of no tokens; their
    slots are not written, and their rows of a result mean nothing.

    Attributes:
        slots: `[num_seqs]` int64, where in a pool each sequence's state is; those of sequences with a context differ.
        query_starts: `[num_seqs + 1]` int32, first token of each sequence, then the end of the last.
        context_lens: `[num_seqs]` int32, tokens of each sequence up to the end of the step, drafts included.
        max_query_len: Most tokens of a sequence, or a bound of it.
        num_kept: `[num_seqs]` int32, how many of its tokens in the step a sequence's state is to remember; those behind
            them are drafts, which see one another but leave nothing in the pool. None keeps all.
    """

    slots: torch.Tensor
    query_starts: torch.Tensor
    context_lens: torch.Tensor
    max_query_len: int
    num_kept: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class SequenceRows:
    """One sequence of `StateRows`, in numbers of the host; `num_kept` of padding is none."""

    slot: int
    first: int
    end: int
    num_kept: int
    is_new: bool
    is_padding: bool


def sequences_of(rows: StateRows) -> list[SequenceRows]:
    """Return the sequences that have tokens in the step, one by one; the device is waited for."""
    starts, contexts = rows.query_starts.tolist(), rows.context_lens.tolist()
    lengths = [end - first for first, end in pairwise(starts)]
    kept = lengths if rows.num_kept is None else rows.num_kept.tolist()
    return [
        SequenceRows(slot, first, first + length, count, context <= length, context == 0)
        for slot, first, length, count, context in zip(
            rows.slots.tolist(), starts[:-1], lengths, kept, contexts, strict=True
        )
        if length
    ]
