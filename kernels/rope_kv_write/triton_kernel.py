# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Rotation, head normalisation and KV write on a GPU: every head is read once and written once.

`triton_cache` writes the results into the cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.dependent_launch import dependent_launch, wait_for_inputs
from kernels.rope_kv_write.reference import HeadNormWeights
from kernels.rope_kv_write.triton_cache import cache_constants, cache_strides, store_parts, write_parts, write_values


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """How the kernel is launched: `block_heads` heads of one token a program."""

    block_heads: int
    num_warps: int


# Reasoned, for every generation: `python -m ops.bench.gpu.tune` compares others.
CONFIG = RopeConfig(block_heads=16, num_warps=4)


@triton.jit
def load_angles(cos_sin_ptr, position, half, HALF: tl.constexpr):
    """Return cosines and sines of a position; those of the angle zero without a table."""
    if cos_sin_ptr is None:
        cos = tl.full(half.shape, 1.0, tl.float32)
        sin = tl.full(half.shape, 0.0, tl.float32)
    else:
        angles_ptr = cos_sin_ptr + position.to(tl.int64) * (2 * HALF)
        cos = tl.load(angles_ptr + half, mask=half < HALF, other=0.0).to(tl.float32)
        sin = tl.load(angles_ptr + HALF + half, mask=half < HALF, other=0.0).to(tl.float32)
    return cos[None, :], sin[None, :]


@triton.jit
def load_weights(query_weight_ptr, key_weight_ptr, dims, is_dim, is_query, is_value):
    """Return what the normalised numbers of each head are multiplied with."""
    query_weight = tl.load(query_weight_ptr + dims, mask=is_dim, other=0.0).to(tl.float32)[None, :]
    key_weight = tl.load(key_weight_ptr + dims, mask=is_dim, other=0.0).to(tl.float32)[None, :]
    return tl.where(is_query, query_weight, tl.where(is_value, 1.0, key_weight))


@triton.jit
def rope_kv_write_kernel(
    qkv_ptr,
    positions_ptr,
    cos_sin_ptr,
    key_cache_ptr,
    value_cache_ptr,
    slot_mapping_ptr,
    scales_ptr,
    query_weight_ptr,
    key_weight_ptr,
    qkv_stride,
    eps,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    NUM_VALUE_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEY_BLOCK_STRIDE: tl.constexpr,
    KEY_TOKEN_STRIDE: tl.constexpr,
    KEY_HEAD_STRIDE: tl.constexpr,
    VALUE_BLOCK_STRIDE: tl.constexpr,
    VALUE_TOKEN_STRIDE: tl.constexpr,
    VALUE_HEAD_STRIDE: tl.constexpr,
    LARGEST: tl.constexpr,
    ROTATED_DIM: tl.constexpr,
    FIRST_ROTATED: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    HAS_NORM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    """Transform BLOCK_HEADS heads of one token; `grid: (num_tokens, blocks of all its heads)`.

    Queries, keys and values take the same path: a value is rotated by the angle zero and scaled by one. A head is held
    in three parts, the two halves that are rotated into each other and the rest, which is empty in most models.
    NUM_VALUE_HEADS is zero where the values are a part of the keys, or written by `write_values`.
    """
    wait_for_inputs()
    HALF: tl.constexpr = ROTATED_DIM // 2
    # From a dimension to the next pair's, and to the one that it is paired with.
    STEP: tl.constexpr = 2 if IS_INTERLEAVED else 1
    PARTNER: tl.constexpr = 1 if IS_INTERLEAVED else HALF
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    is_query = (heads < NUM_HEADS)[:, None]
    is_value = (heads >= NUM_HEADS + NUM_KV_HEADS)[:, None]
    is_head = (heads < NUM_HEADS + NUM_KV_HEADS + NUM_VALUE_HEADS)[:, None]
    half = tl.arange(0, BLOCK_HALF)
    is_half = half < HALF
    first_dims = FIRST_ROTATED + half * STEP
    second_dims = first_dims + PARTNER
    rest_dims = ROTATED_DIM + tl.arange(0, BLOCK_REST)
    if FIRST_ROTATED > 0:
        rest_dims = tl.where(rest_dims < FIRST_ROTATED + ROTATED_DIM, rest_dims - ROTATED_DIM, rest_dims)
    # Which of these the head has: none where all of it is rotated.
    is_rest = (ROTATED_DIM + tl.arange(0, BLOCK_REST)) < HEAD_DIM
    heads_ptr = qkv_ptr + token * qkv_stride + heads[:, None] * HEAD_DIM
    mask = is_head & is_half[None, :]
    first = tl.load(heads_ptr + first_dims[None, :], mask=mask, other=0.0).to(tl.float32)
    second = tl.load(heads_ptr + second_dims[None, :], mask=mask, other=0.0).to(tl.float32)
    rest = None
    if ROTATED_DIM < HEAD_DIM:
        rest = tl.load(heads_ptr + rest_dims[None, :], mask=is_head & is_rest[None, :], other=0.0).to(tl.float32)
    cos, sin = load_angles(cos_sin_ptr, tl.load(positions_ptr + token), half, HALF)
    if HAS_NORM:
        squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
        if rest is not None:
            squares += tl.sum(rest * rest, 1)
        scale = tl.where(is_value, 1.0, tl.rsqrt(squares / HEAD_DIM + eps)[:, None])
        first *= scale * load_weights(query_weight_ptr, key_weight_ptr, first_dims, is_half, is_query, is_value)
        second *= scale * load_weights(query_weight_ptr, key_weight_ptr, second_dims, is_half, is_query, is_value)
        if rest is not None:
            rest *= scale * load_weights(query_weight_ptr, key_weight_ptr, rest_dims, is_rest, is_query, is_value)
    cos = tl.where(is_value, 1.0, cos)
    sin = tl.where(is_value, 0.0, sin)
    rotated_first = first * cos - second * sin
    rotated_second = second * cos + first * sin

    query_type: tl.constexpr = qkv_ptr.dtype.element_ty
    kept = None
    if HAS_NORM and rest is not None:
        kept = rest.to(query_type)
    store_parts(
        heads_ptr, rotated_first.to(query_type), rotated_second.to(query_type), kept,
        first_dims, second_dims, rest_dims, is_query, is_half, is_rest,
    )  # fmt: skip
    if key_cache_ptr is not None:
        write_parts(
            rotated_first, rotated_second, rest, first_dims, second_dims, rest_dims, is_half, is_rest,
            heads - NUM_HEADS, tl.load(slot_mapping_ptr + token), key_cache_ptr, value_cache_ptr, scales_ptr,
            NUM_KV_HEADS, NUM_VALUE_HEADS, BLOCK_SIZE, KEY_BLOCK_STRIDE, KEY_TOKEN_STRIDE, KEY_HEAD_STRIDE,
            VALUE_BLOCK_STRIDE, VALUE_TOKEN_STRIDE, VALUE_HEAD_STRIDE, LARGEST,
        )  # fmt: skip


def rope_kv_write_triton(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor | None,
    key_cache: torch.Tensor | None,
    value_cache: torch.Tensor | None,
    slot_mapping: torch.Tensor,
    head_norm: HeadNormWeights | None = None,
    kv_scales: torch.Tensor | None = None,
    values: torch.Tensor | None = None,
    first_rotated: int = 0,
    is_interleaved: bool = False,
    config: RopeConfig = CONFIG,
) -> torch.Tensor:
    """Do what `kernels.rope_kv_write.rope_kv_write` promises, launched by `config` or else by the table."""
    num_tokens, num_all_heads, head_dim = qkv.shape
    num_kv_heads = 0 if key_cache is None else key_cache.shape[2]
    num_value_heads = num_kv_heads if value_cache is not None and values is None else 0
    num_heads = num_all_heads - num_kv_heads - num_value_heads
    rotated_dim = 0 if cos_sin is None else cos_sin.shape[1]
    assert qkv.stride()[1:] == (head_dim, 1), "the heads of a token must lie side by side: they are changed in place"
    block_heads = min(config.block_heads, triton.next_power_of_2(num_all_heads))
    rope_kv_write_kernel[(num_tokens, triton.cdiv(num_all_heads, block_heads))](
        qkv,
        positions,
        cos_sin,
        key_cache,
        value_cache,
        slot_mapping,
        kv_scales,
        head_norm.query if head_norm else None,
        head_norm.key if head_norm else None,
        qkv.stride(0),
        head_norm.eps if head_norm else 0.0,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        NUM_VALUE_HEADS=num_value_heads,
        HEAD_DIM=head_dim,
        ROTATED_DIM=rotated_dim,
        FIRST_ROTATED=first_rotated,
        IS_INTERLEAVED=is_interleaved,
        HAS_NORM=head_norm is not None,
        BLOCK_HEADS=block_heads,
        BLOCK_HALF=triton.next_power_of_2(max(rotated_dim // 2, 1)),
        BLOCK_REST=triton.next_power_of_2(max(head_dim - rotated_dim, 1)),
        num_warps=config.num_warps,
        **dependent_launch(qkv.device),
        **cache_constants(key_cache),
        **cache_strides("KEY", key_cache),
        **cache_strides("VALUE", value_cache),
    )
    if value_cache is not None and values is not None:
        write_values(values, value_cache, slot_mapping, kv_scales, config.block_heads, config.num_warps)
    return qkv[:, :num_heads]
