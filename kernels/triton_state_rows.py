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


@triton.jit
def softplus(x):
    """Return log(1 + exp(x)), through exp(-|x|), which cannot overflow. Where that is tiny, so is the error."""
    return tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))


@triton.jit
def state_of(
    states_ptr,
    slots_ptr,
    sequence,
    head,
    keys,
    columns,
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
):
    """Return the number of a head's state among those of all slots, where its columns are, and which there are."""
    mask = (keys < KEY_DIM)[:, None] & (columns < VALUE_DIM)[None, :]
    number = tl.load(slots_ptr + sequence) * HEADS + head
    places = states_ptr + number * (KEY_DIM * VALUE_DIM) + keys[:, None] * VALUE_DIM + columns[None, :]
    return number, places, mask


@triton.jit
def copy_state(state, number, places, mask, slot, head, HEADS: tl.constexpr, SIZE: tl.constexpr):
    """Store a head's state, of `SIZE` numbers, in another slot than its own, which is at `places`."""
    tl.store(places + (slot * HEADS + head - number) * SIZE, state, mask=mask)
