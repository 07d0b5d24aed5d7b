# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""What kernels with a recurrent state read of `kernels.state_rows.StateRows` on a GPU."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sequence_of(sequence, starts_ptr, contexts_ptr, kept_ptr, HAS_KEPT: tl.constexpr):
    """Return a sequence's first token, its tokens, those that its state keeps, and whether it is new and padding."""
    first = tl.load(starts_ptr + sequence).to(tl.int64)
    length = tl.load(starts_ptr + sequence + 1) - first.to(tl.int32)
    context = tl.load(contexts_ptr + sequence)
    kept = tl.load(kept_ptr + sequence) if HAS_KEPT else length
    return first, length, kept, (context <= length).to(tl.int32), (context == 0).to(tl.int32)


@triton.jit
def next_save_of(save, last_save, length, save_tokens_ptr):
    """Return behind how many tokens the next copy of the state is made; behind all where none is left."""
    return tl.minimum(tl.load(save_tokens_ptr + save, mask=save < last_save, other=2147483647), length)


@triton.jit
def saves_of(sequence, length, save_starts_ptr, save_tokens_ptr, HAS_SAVES: tl.constexpr):
    """Return the numbers of a sequence's first copy, and of what follows its last, and where the first is made."""
    if HAS_SAVES:
        save, last_save = tl.load(save_starts_ptr + sequence), tl.load(save_starts_ptr + sequence + 1)
        next_save = next_save_of(save, last_save, length, save_tokens_ptr)
    else:
        save, last_save, next_save = 0, 0, length
    return save, last_save, next_save
