# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""The gated delta rule on a GPU: some columns of a head's state stay in a program's registers.

Token by token for decodes, a chunk of tokens at a time for prompts, as `chunked` does in torch. A chunk's corrections
are found row by row; powers of the matrix would have terms that grow before they cancel.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.dependent_launch import wait_for_inputs
from kernels.gated_delta.launch_table import GATED_DELTA
from kernels.gated_delta.reference import NORM_EPS, DeltaSizes, DeltaWeights
from kernels.gpu_config import Gpu
from kernels.matrix_state.triton_launch import launch_update, read_table
from kernels.matrix_state.triton_states import (
    add_chunk,
    chunk_end,
    fading_of,
    keep_state,
    open_state,
    read_chunk,
    softplus,
)
from kernels.state_rows import StateRows
from kernels.triton_state_rows import RowPointers

_CONFIGS = read_table(GATED_DELTA)


@triton.jit
def _decay_and_strength(gates_ptr, tokens, mask, gates_stride, head, rate, step_bias, HEADS: tl.constexpr):
    """Return the logarithm of the decay and the strength of tokens; zeros where there is none."""
    strength = tl.load(gates_ptr + tokens * gates_stride + head, mask=mask, other=0.0).to(tl.float32)
    step = tl.load(gates_ptr + tokens * gates_stride + HEADS + head, mask=mask, other=0.0).to(tl.float32) + step_bias
    return tl.where(mask, -rate * softplus(step), 0.0), tl.where(mask, 1.0 / (1.0 + tl.exp(-strength)), 0.0)


@triton.jit
def _unit_rows(pointers, mask, norm_eps):
    """Load vectors and divide them by their length."""
    vectors = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    return vectors * tl.rsqrt(tl.sum(vectors * vectors, 1) + norm_eps)[:, None]


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
def gated_delta_kernel(
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
    BLOCK_KEY: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Take BLOCK_VALUE columns through a sequence, CHUNK tokens at once."""
    wait_for_inputs()
    rows = RowPointers(slots_ptr, starts_ptr, contexts_ptr, kept_ptr, save_starts_ptr, save_tokens_ptr, save_slots_ptr)
    head, keys, columns, first, length, state, home, saves = open_state(
        states_ptr, rows, HEADS, KEY_DIM, VALUE_DIM, BLOCK_KEY, BLOCK_VALUE
    )
    key_head = head // (HEADS // GROUPS)
    rate, step_bias = tl.load(rate_ptr + head), tl.load(step_bias_ptr + head)
    if CHUNK == 1:
        for token in range(length):
            place = first + token
            qkv = qkv_ptr + place * qkv_stride
            query = tl.load(qkv + key_head * KEY_DIM + keys, mask=keys < KEY_DIM, other=0.0).to(tl.float32)
            key = tl.load(qkv + (GROUPS + key_head) * KEY_DIM + keys, mask=keys < KEY_DIM, other=0.0).to(tl.float32)
            value_ptr = qkv + 2 * GROUPS * KEY_DIM + head * VALUE_DIM
            value = tl.load(value_ptr + columns, mask=columns < VALUE_DIM, other=0.0).to(tl.float32)
            query = query * (tl.rsqrt(tl.sum(query * query, 0) + norm_eps) * query_scale)
            key = key * tl.rsqrt(tl.sum(key * key, 0) + norm_eps)
            log_decay, strength = _decay_and_strength(
                gates_ptr, place, place >= 0, gates_stride, head, rate, step_bias, HEADS
            )
            state = state * tl.exp(log_decay)
            correction = (value - tl.sum(state * key[:, None], 0)) * strength
            state = state + key[:, None] * correction[None, :]
            read = tl.sum(state * query[:, None], 0)
            result = result_ptr + (place * HEADS + head) * VALUE_DIM + columns
            tl.store(result, read.to(result_ptr.dtype.element_ty), mask=columns < VALUE_DIM)
            saves = keep_state(state, token + 1, length, home, saves, rows)
    else:
        inside = tl.arange(0, CHUNK)
        start = 0
        while start < length:
            end = chunk_end(start, length, home, saves, rows, CHUNK)
            is_there = start + inside < end
            tokens = first + start + inside
            key_mask = is_there[:, None] & (keys < KEY_DIM)[None, :]
            query_ptrs = qkv_ptr + tokens[:, None] * qkv_stride + key_head * KEY_DIM + keys[None, :]
            query = _unit_rows(query_ptrs, key_mask, norm_eps) * query_scale
            key = _unit_rows(query_ptrs + GROUPS * KEY_DIM, key_mask, norm_eps)
            value_mask = is_there[:, None] & (columns < VALUE_DIM)[None, :]
            value_ptrs = qkv_ptr + tokens[:, None] * qkv_stride + (2 * GROUPS * KEY_DIM + head * VALUE_DIM)
            value = tl.load(value_ptrs + columns[None, :], mask=value_mask, other=0.0).to(tl.float32)
            log_decay, strength = _decay_and_strength(
                gates_ptr, tokens, is_there, gates_stride, head, rate, step_bias, HEADS
            )
            total, between = fading_of(log_decay, inside)
            products = tl.dot(key, tl.trans(key), input_precision=PRECISION)
            system = tl.where(inside[:, None] > inside[None, :], strength[:, None] * products * between, 0.0)
            known = tl.exp(total)[:, None] * tl.dot(key, state, input_precision=PRECISION)
            corrections = _solve(system, strength[:, None] * (value - known), inside, CHUNK)
            read = read_chunk(state, query, key, corrections, total, between, PRECISION)
            results = result_ptr + (tokens[:, None] * HEADS + head) * VALUE_DIM + columns[None, :]
            tl.store(results, read.to(result_ptr.dtype.element_ty), mask=value_mask)
            state = add_chunk(state, key, corrections, log_decay, total, PRECISION)
            saves = keep_state(state, end, length, home, saves, rows)
            start = end


def gated_delta_triton(
    qkv: torch.Tensor,
    gates: torch.Tensor,
    weights: DeltaWeights,
    sizes: DeltaSizes,
    states: torch.Tensor,
    rows: StateRows,
    gpu: Gpu,
) -> torch.Tensor:
    """Compute what `kernels.gated_delta.gated_delta` promises."""
    shape = qkv.shape[0], sizes.num_value_heads, sizes.value_dim
    return launch_update(
        gated_delta_kernel,
        _CONFIGS[gpu.generation],
        torch.empty(shape, dtype=qkv.dtype, device=qkv.device),
        (qkv, gates, weights.rate, weights.step_bias),
        states,
        rows,
        (qkv.stride(0), gates.stride(0), NORM_EPS, sizes.key_dim**-0.5),
        sizes.num_key_heads,
    )
