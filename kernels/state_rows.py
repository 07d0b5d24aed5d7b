"""Which recurrent state each sequence of a step goes on from, and how much of the step it remembers."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch

from kernels.cpu_structures import StateRowsStructure, address_of


@dataclass(frozen=True, slots=True)
class StateSaves:
    """Copies of states that a step makes on its way; none of them is behind a draft.

    Attributes:
        starts: `[num_seqs + 1]` int32, first copy of each sequence, then the number of copies.
        num_tokens: `[num_saves]` int32, behind how many of the sequence's tokens in the step, in order.
        slots: `[num_saves]` int64, where each goes; no sequence of the step is there.
    """

    starts: torch.Tensor
    num_tokens: torch.Tensor
    slots: torch.Tensor


@dataclass(frozen=True, slots=True)
class StateRows:
    """The sequences of a step, as kernels with a state take them.

    Tokens of all sequences are laid end to end. A sequence whose tokens are its first ones begins with a state of
    zeros, whatever its slot holds: slots need not be cleared. Sequences of padding have a context of no tokens; their
    slots are not written, and their rows of a result mean nothing.

    Attributes:
        slots: `[num_seqs]` int64, where in a pool each sequence's state is; those of sequences with a context differ.
        query_starts: `[num_seqs + 1]` int32, first token of each sequence, then the end of the last.
        context_lens: `[num_seqs]` int32, tokens of each sequence up to the end of the step, drafts included.
        max_query_len: Most tokens of a sequence, or a bound of it.
        num_kept: `[num_seqs]` int32, how many of its tokens in the step a sequence's state is to remember; those behind
            them are drafts, which see one another but leave nothing in the pool. None keeps all.
        saves: Copies to make; None makes none.
    """

    slots: torch.Tensor
    query_starts: torch.Tensor
    context_lens: torch.Tensor
    max_query_len: int
    num_kept: torch.Tensor | None = None
    saves: StateSaves | None = None

    @property
    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """Return all tensors in the order in which kernels take them, those of `saves` behind the others."""
        saves = self.saves
        of_saves = (None, None, None) if saves is None else (saves.starts, saves.num_tokens, saves.slots)
        return (self.slots, self.query_starts, self.context_lens, self.num_kept, *of_saves)


@dataclass(frozen=True, slots=True)
class SequenceRows:
    """One sequence of `StateRows`, in numbers of the host; `saves` are numbers of tokens, and slots."""

    slot: int
    first: int
    end: int
    num_kept: int
    is_new: bool
    is_padding: bool
    saves: tuple[tuple[int, int], ...] = ()

    @property
    def ends(self) -> list[int]:
        """Return behind how many of its tokens the state is kept or copied, then all of them."""
        wanted = {self.num_kept, self.end - self.first, *(count for count, _ in self.saves)}
        return sorted(wanted - {0})


def sequences_of(rows: StateRows) -> list[SequenceRows]:
    """Return the sequences that have tokens in the step, one by one; the device is waited for."""
    starts, contexts = rows.query_starts.tolist(), rows.context_lens.tolist()
    lengths = [end - first for first, end in pairwise(starts)]
    kept = lengths if rows.num_kept is None else rows.num_kept.tolist()
    return [
        SequenceRows(slot, first, first + length, count, context <= length, context == 0, saves)
        for slot, first, length, count, context, saves in zip(
            rows.slots.tolist(), starts[:-1], lengths, kept, contexts, _saves_of(rows), strict=True
        )
        if length
    ]


def _saves_of(rows: StateRows) -> list[tuple[tuple[int, int], ...]]:
    if rows.saves is None:
        return [()] * len(rows.slots)
    pairs = list(zip(rows.saves.num_tokens.tolist(), rows.saves.slots.tolist(), strict=True))
    return [tuple(pairs[first:end]) for first, end in pairwise(rows.saves.starts.tolist())]


def state_rows_structure(rows: StateRows) -> StateRowsStructure:
    """Return the addresses; `rows` must live as long as they are used."""
    return StateRowsStructure(*map(address_of, rows.tensors), len(rows.slots))
