# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""The gated delta rule on a GPU, token by token: some columns of a head's state stay in a program's registers."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.gated_delta.triton_gates import decay_and_strength
from kernels.triton_state_rows import copy_state, next_save_of, saves_of, sequence_of, state_of


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
    keys = tl.arange(0, BLOCK_KEY)
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
    for token in range(length):
        place = first + token
        qkv = qkv_ptr + place * qkv_stride
        query = tl.load(qkv + key_head * KEY_DIM + keys, mask=keys < KEY_DIM, other=0.0).to(tl.float32)
        key = tl.load(qkv + (KEY_HEADS + key_head) * KEY_DIM + keys, mask=keys < KEY_DIM, other=0.0).to(tl.float32)
        value_ptr = qkv + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM
        value = tl.load(value_ptr + columns, mask=columns < VALUE_DIM, other=0.0).to(tl.float32)
        query = query * (tl.rsqrt(tl.sum(query * query, 0) + norm_eps) * query_scale)
        key = key * tl.rsqrt(tl.sum(key * key, 0) + norm_eps)
        log_decay, strength = decay_and_strength(
            gates_ptr, place, place >= 0, gates_stride, head, rate, step_bias, VALUE_HEADS
        )
        state = state * tl.exp(log_decay)
        correction = (value - tl.sum(state * key[:, None], 0)) * strength
        state = state + key[:, None] * correction[None, :]
        read = tl.sum(state * query[:, None], 0)
        result = result_ptr + (place * VALUE_HEADS + head) * VALUE_DIM + columns
        tl.store(result, read.to(result_ptr.dtype.element_ty), mask=columns < VALUE_DIM)
        if token + 1 == kept:
            tl.store(places, state, mask=is_written)
        if HAS_SAVES:  # noqa: SIM102 (decided at compile time, unlike what follows)
            if (token + 1 == next_save) & (save < last_save):
                slot = tl.load(save_slots_ptr + save)
                copy_state(state, number, places, is_written, slot, head, VALUE_HEADS, KEY_DIM * VALUE_DIM)
                save += 1
                next_save = next_save_of(save, last_save, length, save_tokens_ptr)
