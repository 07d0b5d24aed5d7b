"""Where the recurrent states of a step's sequences are, where they come from, and which copies of them are made."""

from __future__ import annotations

from collections.abc import Sequence as Values

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from gpu_worker.core.batch_sequences import BatchSequence
from gpu_worker.core.plan import StateWork

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]


class StateLayout(Struct, frozen=True, gc=False):
    """The states of a step.

    Attributes:
        slots: `[num_seqs]`.
        save_starts: `[num_seqs + 1]`, first copy of each sequence, then how many there are. None where none is made.
        save_tokens: `[num_saves]`, behind how many of the sequence's tokens.
        save_slots: `[num_saves]`, where they go.
    """

    slots: Int64s
    save_starts: Int32s | None = None
    save_tokens: Int32s | None = None
    save_slots: Int64s | None = None


def lay_out_states(sequences: Values[BatchSequence], works: Values[tuple[int, StateWork]]) -> StateLayout:
    """Return where states are; a sequence that has no slot of its own has that of its row's number."""
    own = [sequence.state_slot for sequence in sequences]
    numbers = [item.row if slot is None else slot for item, slot in zip(sequences, own, strict=True)]
    slots = np.array(numbers, dtype=np.int64)
    pairs = np.array([pair for _, work in works for pair in work.saves], dtype=np.int64)
    if not len(pairs):
        return StateLayout(slots)
    counts = np.zeros(len(sequences) + 1, dtype=np.int32)
    for place, work in works:
        counts[place + 1] = len(work.saves)
    starts = counts.cumsum(dtype=np.int32)
    return StateLayout(slots, starts, pairs[:, 0].astype(np.int32), np.ascontiguousarray(pairs[:, 1]))


def padded_states(states: StateLayout, spare_slot: int, num_seqs: int, num_tokens: int) -> StateLayout:
    """Return a step's states at the size of a captured step, with room for as many copies as it can make.

    A copy is made behind a token, and behind none there are two: so many tokens, so many copies at most. Which of them
    there are only `save_starts` tells; what stands behind the last is not read.
    """
    save_starts, save_tokens = np.zeros(num_seqs + 1, dtype=np.int32), np.zeros(num_tokens, dtype=np.int32)
    slots, save_slots = (np.full(count, spare_slot, dtype=np.int64) for count in (num_seqs, num_tokens))
    slots[: len(states.slots)] = states.slots
    if states.save_starts is not None:
        assert states.save_tokens is not None
        assert states.save_slots is not None
        num_saves = len(states.save_slots)
        save_starts[: len(states.save_starts)] = states.save_starts
        save_starts[len(states.save_starts) :] = num_saves
        save_tokens[:num_saves] = states.save_tokens
        save_slots[:num_saves] = states.save_slots
    return StateLayout(slots, save_starts, save_tokens, save_slots)


def state_copies(
    sequences: Values[BatchSequence], works: Values[tuple[int, StateWork]]
) -> tuple[Int64s, Int64s] | None:
    """Return from which slots to which states are copied before the step; None where they all go on as they are."""
    pairs = [
        (work.source, target)
        for work, target in ((work, sequences[place].state_slot) for place, work in works)
        if work.source is not None and target is not None and work.source != target
    ]
    if not pairs:
        return None
    sources, targets = np.array(pairs, dtype=np.int64).T
    return np.ascontiguousarray(sources), np.ascontiguousarray(targets)
