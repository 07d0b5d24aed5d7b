# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""The gated delta rule on a GPU: some columns of a head's state stay in a program's registers.

Token by token for decodes, a chunk of tokens at a time for prompts, as `chunked` does in torch. The inverses of all
chunks' systems do not depend on states, so they are found first, in parallel: row by row, since powers of the matrix
would have terms that grow before they cancel. Only products remain to be computed from chunk to chunk.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.dependent_launch import dependent_launch, wait_for_inputs
from kernels.gated_delta.reference import NORM_EPS, DeltaStep
from kernels.gpu_config import Gpu
from kernels.matrix_state.triton_launch import LaunchConfig, block_of_keys, launch_update, precision_of
from kernels.matrix_state.triton_states import (
    add_chunk,
    chunk_end,
    fading_of,
    keep_state,
    open_state,
    read_chunk,
    softplus,
)
from kernels.triton_state_rows import RowPointers

# Reasoned, not measured yet.
_DATACENTER = LaunchConfig(32, 4, chunk=16, chunk_block_value=32, chunk_num_warps=4)
_OTHERS = LaunchConfig(32, 4, chunk=32, chunk_block_value=16, chunk_num_warps=8)


@triton.jit
def _decay_and_strength(gates_ptr, tokens, mask, gates_stride, head, rate, step_bias, HEADS: tl.constexpr):
    strength = tl.load(gates_ptr + tokens * gates_stride + head, mask=mask, other=0.0).to(tl.float32)
    step = tl.load(gates_ptr + tokens * gates_stride + HEADS + head, mask=mask, other=0.0).to(tl.float32) + step_bias
    return tl.where(mask, -rate * softplus(step), 0.0), tl.where(mask, 1.0 / (1.0 + tl.exp(-strength)), 0.0)


@triton.jit
def _unit_rows(pointers, mask, norm_eps):
    vectors = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    return vectors * tl.rsqrt(tl.sum(vectors * vectors, 1) + norm_eps)[:, None]


@triton.jit(do_not_specialize=["num_tokens", "num_seqs"])
def invert_chunks_kernel(
    inverse_ptr,
    qkv_ptr,
    gates_ptr,
    rate_ptr,
    step_bias_ptr,
    starts_ptr,
    num_tokens,
    num_seqs,
    qkv_stride,
    gates_stride,
    norm_eps,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    BLOCK_KEY: tl.constexpr,
    CHUNK: tl.constexpr,
    SEQS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Invert `1 + system` of CHUNK tokens of the step and a head, where a token's row knows of earlier ones alone.

    A part of a chunk needs the part of the inverse on its diagonal. Tokens of other sequences are left out, and values
    that are NaN, which would reach neighbours: the states and results of their own sequence have them anyway.
    """
    wait_for_inputs()
    inside, keys = tl.arange(0, CHUNK), tl.arange(0, BLOCK_KEY)
    head = tl.program_id(1)
    tokens = tl.program_id(0).to(tl.int64) * CHUNK + inside
    is_there = tokens < num_tokens
    places = (GROUPS + head // (HEADS // GROUPS)) * KEY_DIM + keys
    mask = is_there[:, None] & (keys < KEY_DIM)[None, :]
    key = _unit_rows(qkv_ptr + tokens[:, None] * qkv_stride + places[None, :], mask, norm_eps)
    rate, step_bias = tl.load(rate_ptr + head), tl.load(step_bias_ptr + head)
    log_decay, strength = _decay_and_strength(gates_ptr, tokens, is_there, gates_stride, head, rate, step_bias, HEADS)
    sequences = tl.arange(0, SEQS)
    starts = tl.load(starts_ptr + sequences, mask=sequences < num_seqs, other=2147483647)
    sequence = tl.sum((starts[None, :] <= tokens[:, None]).to(tl.int32), 1)
    is_past = (inside[:, None] >= inside[None, :]) & (sequence[:, None] == sequence[None, :])
    total = tl.sum(tl.where(is_past, log_decay[None, :], 0.0), 1)
    between = tl.exp(tl.where(is_past, total[:, None] - total[None, :], 0.0))
    products = tl.dot(key, tl.trans(key), input_precision=PRECISION)
    system = strength[:, None] * products * between
    is_known = is_past & (inside[:, None] > inside[None, :])
    system = tl.where(is_known & (system == system), system, 0.0)
    inverse = tl.where(inside[:, None] == inside[None, :], 1.0, 0.0)
    for row in range(1, CHUNK):
        is_row = inside == row
        factors = tl.sum(tl.where(is_row[:, None], system, 0.0), 0)
        known = tl.sum(factors[:, None] * inverse, 0)
        inverse = tl.where(is_row[:, None], inverse - known[None, :], inverse)
    target = inverse_ptr + (tokens[:, None] * HEADS + head) * CHUNK + inside[None, :]
    tl.store(target, inverse, mask=is_there[:, None])


@triton.jit
def gated_delta_kernel(
    result_ptr,
    qkv_ptr,
    gates_ptr,
    rate_ptr,
    step_bias_ptr,
    inverse_ptr,
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
            # Chunks are those of the step that `invert_chunks_kernel` has, cut where the sequence wants it.
            offset = ((first + start) % CHUNK).to(tl.int32)
            end = tl.minimum(chunk_end(start, length, home, saves, rows, CHUNK), start + CHUNK - offset)
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
            inverse_ptrs = inverse_ptr + (tokens[:, None] * HEADS + head) * CHUNK + offset + inside[None, :]
            inverse_mask = is_there[:, None] & (start + inside < end)[None, :]
            inverse = tl.load(inverse_ptrs, mask=inverse_mask, other=0.0)
            known = tl.exp(total)[:, None] * tl.dot(key, state, input_precision=PRECISION)
            corrections = tl.dot(inverse, strength[:, None] * (value - known), input_precision=PRECISION)
            read = read_chunk(state, query, key, corrections, total, between, PRECISION)
            results = result_ptr + (tokens[:, None] * HEADS + head) * VALUE_DIM + columns[None, :]
            tl.store(results, read.to(result_ptr.dtype.element_ty), mask=value_mask)
            state = add_chunk(state, key, corrections, log_decay, total, PRECISION)
            saves = keep_state(state, end, length, home, saves, rows)
            start = end


def gated_delta_triton(step: DeltaStep, gpu: Gpu) -> torch.Tensor:
    """Compute what `kernels.gated_delta.gated_delta` promises."""
    config = _DATACENTER if gpu.generation.is_datacenter else _OTHERS
    sizes, weights = step.sizes, step.weights
    chunk = config.chunk_of(sizes.key_dim, step.rows)
    inverse = None if chunk == 1 else _invert_chunks(step, chunk)
    tensors, numbers = (weights.rate, weights.step_bias, inverse), (NORM_EPS, sizes.key_dim**-0.5)
    return launch_update(gated_delta_kernel, config, step, tensors, numbers, sizes.num_key_heads)


def _invert_chunks(step: DeltaStep, chunk: int) -> torch.Tensor:
    qkv, gates, weights, sizes, rows = step.features, step.gates, step.weights, step.sizes, step.rows
    num_tokens, num_heads = qkv.shape[0], sizes.num_value_heads
    inverse = torch.empty((num_tokens, num_heads, chunk), device=qkv.device)
    invert_chunks_kernel[(triton.cdiv(num_tokens, chunk), num_heads)](
        inverse,
        qkv,
        gates,
        weights.rate,
        weights.step_bias,
        rows.query_starts,
        num_tokens,
        len(rows.slots),
        qkv.stride(0),
        gates.stride(0),
        NORM_EPS,
        HEADS=num_heads,
        GROUPS=sizes.num_key_heads,
        KEY_DIM=sizes.key_dim,
        BLOCK_KEY=block_of_keys(sizes.key_dim),
        CHUNK=chunk,
        SEQS=triton.next_power_of_2(len(rows.slots)),
        PRECISION=precision_of(qkv.dtype),
        num_warps=4,
        **dependent_launch(qkv.device),
    )
    return inverse
