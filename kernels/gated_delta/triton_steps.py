# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""The gated delta rule on a GPU, token by token: some columns of a head's state stay in a program's registers."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.gated_delta.triton_gates import decay_and_strength
from kernels.matrix_state.triton_states import keep_state, open_state


@triton.jit(do_not_specialize=["qkv_stride", "gates_stride"])
def gated_delta_steps_kernel(
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
    key_head = head // (HEADS // GROUPS)
    rate, step_bias = tl.load(rate_ptr + head), tl.load(step_bias_ptr + head)
    for token in range(length):
        place = first + token
        qkv = qkv_ptr + place * qkv_stride
        query = tl.load(qkv + key_head * KEY_DIM + keys, mask=keys < KEY_DIM, other=0.0).to(tl.float32)
        key = tl.load(qkv + (GROUPS + key_head) * KEY_DIM + keys, mask=keys < KEY_DIM, other=0.0).to(tl.float32)
        value_ptr = qkv + 2 * GROUPS * KEY_DIM + head * VALUE_DIM
        value = tl.load(value_ptr + columns, mask=columns < VALUE_DIM, other=0.0).to(tl.float32)
        query = query * (tl.rsqrt(tl.sum(query * query, 0) + norm_eps) * query_scale)
        key = key * tl.rsqrt(tl.sum(key * key, 0) + norm_eps)
        log_decay, strength = decay_and_strength(
            gates_ptr, place, place >= 0, gates_stride, head, rate, step_bias, HEADS
        )
        state = state * tl.exp(log_decay)
        correction = (value - tl.sum(state * key[:, None], 0)) * strength
        state = state + key[:, None] * correction[None, :]
        read = tl.sum(state * query[:, None], 0)
        result = result_ptr + (place * HEADS + head) * VALUE_DIM + columns
        tl.store(result, read.to(result_ptr.dtype.element_ty), mask=columns < VALUE_DIM)
        saves = keep_state(
            state, token + 1, length, home, saves, save_tokens_ptr, save_slots_ptr, HEADS, KEY_DIM, VALUE_DIM, HAS_SAVES
        )
