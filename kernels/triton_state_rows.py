# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""What kernels with a recurrent state read of `kernels.state_rows.StateRows` on a GPU."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl


class RowPointers(NamedTuple):
    """The tensors of `StateRows`; None where there is none."""

    slots: Any
    starts: Any
    contexts: Any
    kept: Any
    save_starts: Any
    save_tokens: Any
    save_slots: Any


@triton.jit
def sequence_of(sequence, rows):
    """Return a sequence's first token, its tokens, those that its state keeps, and whether it is new and padding."""
    first = tl.load(rows.starts + sequence).to(tl.int64)
    length = tl.load(rows.starts + sequence + 1) - first.to(tl.int32)
    context = tl.load(rows.contexts + sequence)
    kept = length if rows.kept is None else tl.load(rows.kept + sequence)
    return first, length, kept, (context <= length).to(tl.int32), (context == 0).to(tl.int32)


@triton.jit
def next_save_of(save, last_save, length, rows):
    """Return behind how many tokens the next copy of the state is made; behind all where none is left."""
    return tl.minimum(tl.load(rows.save_tokens + save, mask=save < last_save, other=2147483647), length)


@triton.jit
def saves_of(sequence, length, rows):
    """Return the numbers of a sequence's first copy, and of what follows its last, and where the first is made."""
    if rows.save_starts is None:
        save, last_save, next_save = 0, 0, length
    else:
        save, last_save = tl.load(rows.save_starts + sequence), tl.load(rows.save_starts + sequence + 1)
        next_save = next_save_of(save, last_save, length, rows)
    return save, last_save, next_save
