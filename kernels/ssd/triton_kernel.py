# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Mamba-2's state update on a GPU: some columns of a head's state stay in a program's registers.

Token by token for decodes, a chunk of tokens at a time for prompts, as `chunked` does in torch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.dependent_launch import wait_for_inputs
from kernels.gpu_config import Gpu
from kernels.matrix_state.triton_launch import LaunchConfig, launch_update
from kernels.matrix_state.triton_states import (
    add_chunk,
    chunk_end,
    fading_of,
    keep_state,
    open_state,
    read_chunk,
    softplus,
)
from kernels.ssd.reference import SsdStep
from kernels.triton_state_rows import RowPointers

# Reasoned, not measured yet.
_DATACENTER = LaunchConfig(32, 4, chunk=32, chunk_block_value=32, chunk_num_warps=4)
_OTHERS = LaunchConfig(32, 4, chunk=32, chunk_block_value=32, chunk_num_warps=8)


@triton.jit
def _step_of(steps_ptr, tokens, mask, steps_stride, head, step_bias, min_step, max_step):
    step = tl.load(steps_ptr + tokens * steps_stride + head, mask=mask, other=0.0).to(tl.float32) + step_bias
    step = softplus(step)
    # Comparisons keep NaN.
    step = tl.where(step < min_step, min_step, tl.where(step > max_step, max_step, step))
    return tl.where(mask, step, 0.0)


@triton.jit
def ssd_kernel(
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
    group = head // (HEADS // GROUPS)
    rate, step_bias, skip = tl.load(rate_ptr + head), tl.load(step_bias_ptr + head), tl.load(skip_ptr + head)
    if CHUNK == 1:
        for token in range(length):
            place = first + token
            features = features_ptr + place * features_stride
            inputs = features + HEADS * VALUE_DIM + group * KEY_DIM + keys
            state_input = tl.load(inputs, mask=keys < KEY_DIM, other=0.0).to(tl.float32)
            output = tl.load(inputs + GROUPS * KEY_DIM, mask=keys < KEY_DIM, other=0.0).to(tl.float32)
            value = tl.load(features + head * VALUE_DIM + columns, mask=columns < VALUE_DIM, other=0.0).to(tl.float32)
            step = _step_of(steps_ptr, place, place >= 0, steps_stride, head, step_bias, min_step, max_step)
            state = state * tl.exp(-rate * step) + state_input[:, None] * (value * step)[None, :]
            read = tl.sum(state * output[:, None], 0) + value * skip
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
            features = features_ptr + tokens[:, None] * features_stride
            input_mask = is_there[:, None] & (keys < KEY_DIM)[None, :]
            inputs = features + HEADS * VALUE_DIM + group * KEY_DIM + keys[None, :]
            state_input = tl.load(inputs, mask=input_mask, other=0.0).to(tl.float32)
            output = tl.load(inputs + GROUPS * KEY_DIM, mask=input_mask, other=0.0).to(tl.float32)
            value_mask = is_there[:, None] & (columns < VALUE_DIM)[None, :]
            value = tl.load(features + head * VALUE_DIM + columns[None, :], mask=value_mask, other=0.0).to(tl.float32)
            step = _step_of(steps_ptr, tokens, is_there, steps_stride, head, step_bias, min_step, max_step)
            added, log_decay = value * step[:, None], -rate * step
            total, between = fading_of(log_decay, inside)
            read = read_chunk(state, output, state_input, added, total, between, PRECISION) + value * skip
            results = result_ptr + (tokens[:, None] * HEADS + head) * VALUE_DIM + columns[None, :]
            tl.store(results, read.to(result_ptr.dtype.element_ty), mask=value_mask)
            state = add_chunk(state, state_input, added, log_decay, total, PRECISION)
            saves = keep_state(state, end, length, home, saves, rows)
            start = end


def ssd_triton(step: SsdStep, gpu: Gpu) -> torch.Tensor:
    """Compute what `kernels.ssd.ssd` promises."""
    config, weights = _DATACENTER if gpu.generation.is_datacenter else _OTHERS, step.weights
    tensors, numbers = (weights.rate, weights.step_bias, weights.skip), (weights.min_step, weights.max_step)
    return launch_update(ssd_kernel, config, step, tensors, numbers, step.sizes.num_groups)
