# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""What both kernels of the gated delta rule read of the gates and of a state."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def decay_and_strength(gates_ptr, tokens, mask, gates_stride, head, rate, step_bias, HEADS: tl.constexpr):
    """Return the logarithm of the decay and the strength of tokens; zeros where there is none."""
    strength = tl.load(gates_ptr + tokens * gates_stride + head, mask=mask, other=0.0).to(tl.float32)
    step = tl.load(gates_ptr + tokens * gates_stride + HEADS + head, mask=mask, other=0.0).to(tl.float32) + step_bias
    # The logarithm of 1 + exp(step), through exp(-|step|), which cannot overflow. Where that is tiny, so is the error.
    softplus = tl.maximum(step, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(step)))
    return tl.where(mask, -rate * softplus, 0.0), tl.where(mask, 1.0 / (1.0 + tl.exp(-strength)), 0.0)


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
