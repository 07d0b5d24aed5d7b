# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Mamba-2's state update on a GPU, a chunk of tokens at a time; `chunked` is the same in torch."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.ssd.triton_steps import step_of
from kernels.triton_state_rows import copy_state, next_save_of, saves_of, sequence_of, state_of


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
    keys, rows = tl.arange(0, BLOCK_STATE), tl.arange(0, CHUNK)
    columns = tl.program_id(1) * BLOCK_VALUE + tl.arange(0, BLOCK_VALUE)
    number, places, mask = state_of(states_ptr, slots_ptr, sequence, head, keys, columns, HEADS, STATE, HEAD_DIM)
    state = tl.load(places, mask=mask & (is_new == 0), other=0.0)
    is_written = mask & (is_padding == 0)
    if kept == 0:
        tl.store(places, state, mask=is_written)
    save, last_save, next_save = saves_of(sequence, length, save_starts_ptr, save_tokens_ptr, HAS_SAVES)
    rate, step_bias, skip = tl.load(rate_ptr + head), tl.load(step_bias_ptr + head), tl.load(skip_ptr + head)
    start = 0
    while start < length:
        # What is kept or copied ends with a chunk.
        end = tl.minimum(tl.minimum(start + CHUNK, length), tl.where(kept > start, kept, length))
        if HAS_SAVES:
            end = tl.minimum(end, next_save)
        is_there = start + rows < end
        tokens = first + start + rows
        features = features_ptr + tokens[:, None] * features_stride
        input_mask = is_there[:, None] & (keys < STATE)[None, :]
        inputs = features + HEADS * HEAD_DIM + group * STATE + keys[None, :]
        state_input = tl.load(inputs, mask=input_mask, other=0.0).to(tl.float32)
        output = tl.load(inputs + GROUPS * STATE, mask=input_mask, other=0.0).to(tl.float32)
        value_mask = is_there[:, None] & (columns < HEAD_DIM)[None, :]
        value = tl.load(features + head * HEAD_DIM + columns[None, :], mask=value_mask, other=0.0).to(tl.float32)
        step = step_of(steps_ptr, tokens, is_there, steps_stride, head, step_bias, min_step, max_step)
        scaled = value * step[:, None]
        log_decay = -rate * step
        total = tl.cumsum(log_decay, 0)
        # From the token of a column to that of a row; what lies ahead counts nothing.
        is_past = rows[:, None] >= rows[None, :]
        decay = tl.where(is_past, tl.exp(tl.where(is_past, total[:, None] - total[None, :], 0.0)), 0.0)
        seen = tl.dot(output, tl.trans(state_input), input_precision=PRECISION) * decay
        read = tl.exp(total)[:, None] * tl.dot(output, state, input_precision=PRECISION)
        read += tl.dot(seen, scaled, input_precision=PRECISION) + value * skip
        results = result_ptr + (tokens[:, None] * HEADS + head) * HEAD_DIM + columns[None, :]
        tl.store(results, read.to(result_ptr.dtype.element_ty), mask=value_mask)
        whole = tl.sum(log_decay, 0)
        fading = state_input * tl.exp(whole - total)[:, None]
        state = state * tl.exp(whole) + tl.dot(tl.trans(fading), scaled, input_precision=PRECISION)
        if end == kept:
            tl.store(places, state, mask=is_written)
        if HAS_SAVES:  # noqa: SIM102 (decided at compile time, unlike what follows)
            if (end == next_save) & (save < last_save):
                slot = tl.load(save_slots_ptr + save)
                copy_state(state, number, places, is_written, slot, head, HEADS, STATE * HEAD_DIM)
                save += 1
                next_save = next_save_of(save, last_save, length, save_tokens_ptr)
        start = end
