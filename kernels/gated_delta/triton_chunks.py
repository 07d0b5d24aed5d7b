# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""The gated delta rule on a GPU, a chunk of tokens at a time; `chunked` is the same in torch.

A chunk's corrections are found row by row; powers of the matrix would have terms that grow before they cancel.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.gated_delta.triton_gates import decay_and_strength
from kernels.matrix_state.triton_states import add_chunk, chunk_end, fading_of, keep_state, open_state, read_chunk


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
    key_head, rows = head // (HEADS // GROUPS), tl.arange(0, CHUNK)
    rate, step_bias = tl.load(rate_ptr + head), tl.load(step_bias_ptr + head)
    start = 0
    while start < length:
        end = chunk_end(start, length, home, saves, CHUNK, HAS_SAVES)
        is_there = start + rows < end
        tokens = first + start + rows
        key_mask = is_there[:, None] & (keys < KEY_DIM)[None, :]
        query_ptrs = qkv_ptr + tokens[:, None] * qkv_stride + key_head * KEY_DIM + keys[None, :]
        query = _unit_rows(query_ptrs, key_mask, norm_eps) * query_scale
        key = _unit_rows(query_ptrs + GROUPS * KEY_DIM, key_mask, norm_eps)
        value_mask = is_there[:, None] & (columns < VALUE_DIM)[None, :]
        value_ptrs = qkv_ptr + tokens[:, None] * qkv_stride + (2 * GROUPS * KEY_DIM + head * VALUE_DIM)
        value = tl.load(value_ptrs + columns[None, :], mask=value_mask, other=0.0).to(tl.float32)
        log_decay, strength = decay_and_strength(
            gates_ptr, tokens, is_there, gates_stride, head, rate, step_bias, HEADS
        )
        total, between = fading_of(log_decay, rows)
        products = tl.dot(key, tl.trans(key), input_precision=PRECISION)
        system = tl.where(rows[:, None] > rows[None, :], strength[:, None] * products * between, 0.0)
        known = tl.exp(total)[:, None] * tl.dot(key, state, input_precision=PRECISION)
        corrections = _solve(system, strength[:, None] * (value - known), rows, CHUNK)
        read = read_chunk(state, query, key, corrections, total, between, PRECISION)
        results = result_ptr + (tokens[:, None] * HEADS + head) * VALUE_DIM + columns[None, :]
        tl.store(results, read.to(result_ptr.dtype.element_ty), mask=value_mask)
        state = add_chunk(state, key, corrections, log_decay, total, PRECISION)
        saves = keep_state(
            state, end, length, home, saves, save_tokens_ptr, save_slots_ptr, HEADS, KEY_DIM, VALUE_DIM, HAS_SAVES
        )
        start = end
