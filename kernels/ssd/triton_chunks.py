# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Mamba-2's state update on a GPU, a chunk of tokens at a time; `chunked` is the same in torch."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.matrix_state.triton_states import add_chunk, chunk_end, fading_of, keep_state, open_state, read_chunk
from kernels.ssd.triton_steps import step_of


@triton.jit(do_not_specialize=["features_stride", "steps_stride"])
def ssd_chunks_kernel(
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
    group, rows = head // (HEADS // GROUPS), tl.arange(0, CHUNK)
    rate, step_bias, skip = tl.load(rate_ptr + head), tl.load(step_bias_ptr + head), tl.load(skip_ptr + head)
    start = 0
    while start < length:
        end = chunk_end(start, length, home, saves, CHUNK, HAS_SAVES)
        is_there = start + rows < end
        tokens = first + start + rows
        features = features_ptr + tokens[:, None] * features_stride
        input_mask = is_there[:, None] & (keys < KEY_DIM)[None, :]
        inputs = features + HEADS * VALUE_DIM + group * KEY_DIM + keys[None, :]
        state_input = tl.load(inputs, mask=input_mask, other=0.0).to(tl.float32)
        output = tl.load(inputs + GROUPS * KEY_DIM, mask=input_mask, other=0.0).to(tl.float32)
        value_mask = is_there[:, None] & (columns < VALUE_DIM)[None, :]
        value = tl.load(features + head * VALUE_DIM + columns[None, :], mask=value_mask, other=0.0).to(tl.float32)
        step = step_of(steps_ptr, tokens, is_there, steps_stride, head, step_bias, min_step, max_step)
        added, log_decay = value * step[:, None], -rate * step
        total, between = fading_of(log_decay, rows)
        read = read_chunk(state, output, state_input, added, total, between, PRECISION) + value * skip
        results = result_ptr + (tokens[:, None] * HEADS + head) * VALUE_DIM + columns[None, :]
        tl.store(results, read.to(result_ptr.dtype.element_ty), mask=value_mask)
        state = add_chunk(state, state_input, added, log_decay, total, PRECISION)
        saves = keep_state(
            state, end, length, home, saves, save_tokens_ptr, save_slots_ptr, HEADS, KEY_DIM, VALUE_DIM, HAS_SAVES
        )
        start = end
