# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Mamba-2's state update on a GPU, token by token: some columns of a head's state stay in a program's registers."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton_state_rows import copy_state, next_save_of, saves_of, sequence_of, softplus, state_of


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
    STATE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HAS_KEPT: tl.constexpr,
    HAS_SAVES: tl.constexpr,
    BLOCK_STATE: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Take BLOCK_VALUE columns through a sequence; `grid: (num_seqs * HEADS, blocks of columns)`."""
    sequence, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    first, length, kept, is_new, is_padding = sequence_of(sequence, starts_ptr, contexts_ptr, kept_ptr, HAS_KEPT)
    group = head // (HEADS // GROUPS)
    keys = tl.arange(0, BLOCK_STATE)
    columns = tl.program_id(1) * BLOCK_VALUE + tl.arange(0, BLOCK_VALUE)
    number, places, mask = state_of(states_ptr, slots_ptr, sequence, head, keys, columns, HEADS, STATE, HEAD_DIM)
    state = tl.load(places, mask=mask & (is_new == 0), other=0.0)
    is_written = mask & (is_padding == 0)
    if kept == 0:
        tl.store(places, state, mask=is_written)
    save, last_save, next_save = saves_of(sequence, length, save_starts_ptr, save_tokens_ptr, HAS_SAVES)
    rate, step_bias, skip = tl.load(rate_ptr + head), tl.load(step_bias_ptr + head), tl.load(skip_ptr + head)
    for token in range(length):
        place = first + token
        features = features_ptr + place * features_stride
        inputs = features + HEADS * HEAD_DIM + group * STATE + keys
        state_input = tl.load(inputs, mask=keys < STATE, other=0.0).to(tl.float32)
        output = tl.load(inputs + GROUPS * STATE, mask=keys < STATE, other=0.0).to(tl.float32)
        value = tl.load(features + head * HEAD_DIM + columns, mask=columns < HEAD_DIM, other=0.0).to(tl.float32)
        step = step_of(steps_ptr, place, place >= 0, steps_stride, head, step_bias, min_step, max_step)
        state = state * tl.exp(-rate * step) + state_input[:, None] * (value * step)[None, :]
        read = tl.sum(state * output[:, None], 0) + value * skip
        result = result_ptr + (place * HEADS + head) * HEAD_DIM + columns
        tl.store(result, read.to(result_ptr.dtype.element_ty), mask=columns < HEAD_DIM)
        if token + 1 == kept:
            tl.store(places, state, mask=is_written)
        if HAS_SAVES:  # noqa: SIM102 (decided at compile time, unlike what follows)
            if (token + 1 == next_save) & (save < last_save):
                slot = tl.load(save_slots_ptr + save)
                copy_state(state, number, places, is_written, slot, head, HEADS, STATE * HEAD_DIM)
                save += 1
                next_save = next_save_of(save, last_save, length, save_tokens_ptr)
