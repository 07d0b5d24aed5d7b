# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""The gated delta rule on a GPU, a chunk of tokens at a time; `chunked` is the same in torch.

A chunk's corrections are found row by row; powers of the matrix would have terms that grow before they cancel.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.gated_delta.triton_gates import decay_and_strength
from kernels.triton_state_rows import copy_state, next_save_of, saves_of, sequence_of, state_of


@triton.jit
def _solve(system, wanted, rows, CHUNK: tl.constexpr):
    """Return `u` of `u + system @ u = wanted`, where the system's rows know of earlier ones alone."""
    solved = wanted
    for row in range(1, CHUNK):
        is_row = rows == row
        factors = tl.sum(tl.where(is_row[:, None], system, 0.0), 0)
        known = tl.sum(factors[:, None] * solved, 0)
        solved = tl.where(is_row[:, None], solved - known[None, :], solved)
    return solved


@triton.jit
def _unit_rows(pointers, mask, norm_eps):
    """Load vectors and divide them by their length."""
    vectors = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    return vectors * tl.rsqrt(tl.sum(vectors * vectors, 1) + norm_eps)[:, None]


@triton.jit(do_not_specialize=["qkv_stride", "gates_stride"])
def gated_delta_chunks_kernel(
    result_ptr,
    qkv_ptr,
    gates_ptr,
    rate_ptr,
    step_bias_ptr,
    states_ptr,
    slots_ptr,
    starts_ptr,
    contexts_ptr,
    kept_ptr,
    save_starts_ptr,
    save_tokens_ptr,
    save_slots_ptr,
    qkv_stride,
    gates_stride,
    norm_eps,
    query_scale,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    HAS_KEPT: tl.constexpr,
    HAS_SAVES: tl.constexpr,
    BLOCK_KEY: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Take BLOCK_VALUE columns through a sequence; `grid: (num_seqs * VALUE_HEADS, blocks of columns)`."""
    sequence, head = tl.program_id(0) // VALUE_HEADS, tl.program_id(0) % VALUE_HEADS
    first, length, kept, is_new, is_padding = sequence_of(sequence, starts_ptr, contexts_ptr, kept_ptr, HAS_KEPT)
    key_head = head // (VALUE_HEADS // KEY_HEADS)
    keys, rows = tl.arange(0, BLOCK_KEY), tl.arange(0, CHUNK)
    columns = tl.program_id(1) * BLOCK_VALUE + tl.arange(0, BLOCK_VALUE)
    number, places, mask = state_of(
        states_ptr, slots_ptr, sequence, head, keys, columns, VALUE_HEADS, KEY_DIM, VALUE_DIM
    )
    state = tl.load(places, mask=mask & (is_new == 0), other=0.0)
    is_written = mask & (is_padding == 0)
    if kept == 0:
        tl.store(places, state, mask=is_written)
    save, last_save, next_save = saves_of(sequence, length, save_starts_ptr, save_tokens_ptr, HAS_SAVES)
    rate, step_bias = tl.load(rate_ptr + head), tl.load(step_bias_ptr + head)
    start = 0
    while start < length:
        # What is kept or copied ends with a chunk.
        end = tl.minimum(tl.minimum(start + CHUNK, length), tl.where(kept > start, kept, length))
        if HAS_SAVES:
            end = tl.minimum(end, next_save)
        is_there = start + rows < end
        tokens = first + start + rows
        key_mask = is_there[:, None] & (keys < KEY_DIM)[None, :]
        query_ptrs = qkv_ptr + tokens[:, None] * qkv_stride + key_head * KEY_DIM + keys[None, :]
        query = _unit_rows(query_ptrs, key_mask, norm_eps) * query_scale
        key = _unit_rows(query_ptrs + KEY_HEADS * KEY_DIM, key_mask, norm_eps)
        value_mask = is_there[:, None] & (columns < VALUE_DIM)[None, :]
        value_ptrs = qkv_ptr + tokens[:, None] * qkv_stride + (2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM)
        value = tl.load(value_ptrs + columns[None, :], mask=value_mask, other=0.0).to(tl.float32)
        log_decay, strength = decay_and_strength(
            gates_ptr, tokens, is_there, gates_stride, head, rate, step_bias, VALUE_HEADS
        )
        total = tl.cumsum(log_decay, 0)
        since_start = tl.exp(total)[:, None]
        # From the token of a column to that of a row; what lies ahead counts nothing.
        is_past = rows[:, None] >= rows[None, :]
        decay = tl.where(is_past, tl.exp(tl.where(is_past, total[:, None] - total[None, :], 0.0)), 0.0)
        products = tl.dot(key, tl.trans(key), input_precision=PRECISION)
        system = tl.where(rows[:, None] > rows[None, :], strength[:, None] * products * decay, 0.0)
        known = tl.dot(key, state, input_precision=PRECISION)
        corrections = _solve(system, strength[:, None] * (value - since_start * known), rows, CHUNK)
        read = since_start * tl.dot(query, state, input_precision=PRECISION)
        seen = tl.dot(query, tl.trans(key), input_precision=PRECISION) * decay
        read += tl.dot(seen, corrections, input_precision=PRECISION)
        results = result_ptr + (tokens[:, None] * VALUE_HEADS + head) * VALUE_DIM + columns[None, :]
        tl.store(results, read.to(result_ptr.dtype.element_ty), mask=value_mask)
        whole = tl.sum(log_decay, 0)
        fading = key * tl.exp(whole - total)[:, None]
        state = state * tl.exp(whole) + tl.dot(tl.trans(fading), corrections, input_precision=PRECISION)
        if end == kept:
            tl.store(places, state, mask=is_written)
        if HAS_SAVES:  # noqa: SIM102 (decided at compile time, unlike what follows)
            if (end == next_save) & (save < last_save):
                slot = tl.load(save_slots_ptr + save)
                copy_state(state, number, places, is_written, slot, head, VALUE_HEADS, KEY_DIM * VALUE_DIM)
                save += 1
                next_save = next_save_of(save, last_save, length, save_tokens_ptr)
        start = end
