# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Mamba-2's state update on a GPU, token by token: some columns of a head's state stay in a program's registers."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.matrix_state.triton_states import keep_state, open_state, softplus


@triton.jit
def step_of(steps_ptr, tokens, mask, steps_stride, head, step_bias, min_step, max_step):
    """Return the steps of tokens, within their bounds; zeros where there is none."""
    step = tl.load(steps_ptr + tokens * steps_stride + head, mask=mask, other=0.0).to(tl.float32) + step_bias
    step = softplus(step)
    # Comparisons keep what is no number.
    step = tl.where(step < min_step, min_step, tl.where(step > max_step, max_step, step))
    return tl.where(mask, step, 0.0)


@triton.jit(do_not_specialize=["features_stride", "steps_stride"])
def ssd_steps_kernel(
    result_ptr,
    features_ptr,
    steps_ptr,
    rate_ptr,
    step_bias_ptr,
    skip_ptr,
    states_ptr,
    slots_ptr,
    starts_ptr,
    contexts_ptr,
    kept_ptr,
    save_starts_ptr,
    save_tokens_ptr,
    save_slots_ptr,
    features_stride,
    steps_stride,
    min_step,
    max_step,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    HAS_KEPT: tl.constexpr,
    HAS_SAVES: tl.constexpr,
    BLOCK_KEY: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Take BLOCK_VALUE columns through a sequence."""
    head, keys, columns, first, length, state, home, saves = open_state(
        states_ptr,
        slots_ptr,
        starts_ptr,
        contexts_ptr,
        kept_ptr,
        save_starts_ptr,
        save_tokens_ptr,
        HEADS,
        KEY_DIM,
        VALUE_DIM,
        HAS_KEPT,
        HAS_SAVES,
        BLOCK_KEY,
        BLOCK_VALUE,
    )
    group = head // (HEADS // GROUPS)
    rate, step_bias, skip = tl.load(rate_ptr + head), tl.load(step_bias_ptr + head), tl.load(skip_ptr + head)
    for token in range(length):
        place = first + token
        features = features_ptr + place * features_stride
        inputs = features + HEADS * VALUE_DIM + group * KEY_DIM + keys
        state_input = tl.load(inputs, mask=keys < KEY_DIM, other=0.0).to(tl.float32)
        output = tl.load(inputs + GROUPS * KEY_DIM, mask=keys < KEY_DIM, other=0.0).to(tl.float32)
        value = tl.load(features + head * VALUE_DIM + columns, mask=columns < VALUE_DIM, other=0.0).to(tl.float32)
        step = step_of(steps_ptr, place, place >= 0, steps_stride, head, step_bias, min_step, max_step)
        state = state * tl.exp(-rate * step) + state_input[:, None] * (value * step)[None, :]
        read = tl.sum(state * output[:, None], 0) + value * skip
        result = result_ptr + (place * HEADS + head) * VALUE_DIM + columns
        tl.store(result, read.to(result_ptr.dtype.element_ty), mask=columns < VALUE_DIM)
        saves = keep_state(
            state, token + 1, length, home, saves, save_tokens_ptr, save_slots_ptr, HEADS, KEY_DIM, VALUE_DIM, HAS_SAVES
        )
