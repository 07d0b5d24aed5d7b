# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Rotation, head normalisation and KV write on a GPU: every head is read once and written once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.gpu_config import Gpu, GpuGeneration
from kernels.quantized_kv import LARGEST
from kernels.rope_kv_write.launch_table import ROPE_KV_WRITE
from kernels.rope_kv_write.reference import HeadNormWeights


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """How the kernel is launched: `block_heads` heads of one token a program."""

    block_heads: int
    num_warps: int


_CONFIGS = {GpuGeneration[name]: RopeConfig(**entry) for name, entry in ROPE_KV_WRITE.items()}


@triton.jit
def scales_of(largest, LARGEST: tl.constexpr):
    """Return the scales of heads whose largest magnitudes are given, and what their elements are multiplied with."""
    scales = tl.minimum(tl.div_rn(largest, LARGEST), 65504.0).to(tl.float16)
    wide = scales.to(tl.float32)
    return scales, tl.where(wide > 0, tl.div_rn(1.0, tl.where(wide > 0, wide, 1.0)), 0.0)


@triton.jit
def to_cache(x, cache_ptr, LARGEST: tl.constexpr):
    """Convert to the cache's type: to one of eight bits, whose largest number is LARGEST, with saturation."""
    cache_type: tl.constexpr = cache_ptr.dtype.element_ty
    if LARGEST > 0:
        x = tl.minimum(tl.maximum(x, -LARGEST), LARGEST)
    if cache_type == tl.int8:
        # Rounds to the nearest integer, to the even one of two: fp32 has none but integers from 2^23 to 2^24.
        x = x + 12582912.0 - 12582912.0
    return x.to(cache_type)


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
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    LARGEST: tl.constexpr,
    ROTATED_DIM: tl.constexpr,
    HAS_NORM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    """Transform BLOCK_HEADS heads of one token; `grid: (num_tokens, blocks of all its heads)`.

    Queries, keys and values take the same path: a value is rotated by the angle zero and scaled by one. A head is held
    in three parts, the two halves that are rotated into each other and the rest, which is empty in most models.
    """
    HALF: tl.constexpr = ROTATED_DIM // 2
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    is_query = (heads < NUM_HEADS)[:, None]
    is_value = (heads >= NUM_HEADS + NUM_KV_HEADS)[:, None]
    is_head = (heads < NUM_HEADS + 2 * NUM_KV_HEADS)[:, None]
    half = tl.arange(0, BLOCK_HALF)
    is_half = half < HALF
    mask = is_head & is_half[None, :]
    heads_ptr = qkv_ptr + token * qkv_stride + heads[:, None] * HEAD_DIM
    first = tl.load(heads_ptr + half[None, :], mask=mask, other=0.0).to(tl.float32)
    second = tl.load(heads_ptr + HALF + half[None, :], mask=mask, other=0.0).to(tl.float32)
    angles_ptr = cos_sin_ptr + tl.load(positions_ptr + token).to(tl.int64) * ROTATED_DIM
    cos = tl.load(angles_ptr + half, mask=is_half, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(angles_ptr + HALF + half, mask=is_half, other=0.0).to(tl.float32)[None, :]
    if ROTATED_DIM < HEAD_DIM:
        rest_dims = ROTATED_DIM + tl.arange(0, BLOCK_REST)
        is_rest = rest_dims < HEAD_DIM
        rest_mask = is_head & is_rest[None, :]
        rest = tl.load(heads_ptr + rest_dims[None, :], mask=rest_mask, other=0.0).to(tl.float32)
    if HAS_NORM:
        squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
        if ROTATED_DIM < HEAD_DIM:
            squares += tl.sum(rest * rest, 1)
        scale = tl.where(is_value, 1.0, tl.rsqrt(squares / HEAD_DIM + eps)[:, None])
        query_weight = tl.load(query_weight_ptr + half, mask=is_half, other=0.0).to(tl.float32)[None, :]
        key_weight = tl.load(key_weight_ptr + half, mask=is_half, other=0.0).to(tl.float32)[None, :]
        first *= scale * tl.where(is_query, query_weight, tl.where(is_value, 1.0, key_weight))
        query_weight = tl.load(query_weight_ptr + HALF + half, mask=is_half, other=0.0).to(tl.float32)[None, :]
        key_weight = tl.load(key_weight_ptr + HALF + half, mask=is_half, other=0.0).to(tl.float32)[None, :]
        second *= scale * tl.where(is_query, query_weight, tl.where(is_value, 1.0, key_weight))
        if ROTATED_DIM < HEAD_DIM:
            query_weight = tl.load(query_weight_ptr + rest_dims, mask=is_rest, other=0.0).to(tl.float32)[None, :]
            key_weight = tl.load(key_weight_ptr + rest_dims, mask=is_rest, other=0.0).to(tl.float32)[None, :]
            rest *= scale * tl.where(is_query, query_weight, tl.where(is_value, 1.0, key_weight))
    cos = tl.where(is_value, 1.0, cos)
    sin = tl.where(is_value, 0.0, sin)
    rotated_first = first * cos - second * sin
    rotated_second = second * cos + first * sin

    slot = tl.load(slot_mapping_ptr + token)
    is_key = is_head & (heads >= NUM_HEADS)[:, None] & (heads < NUM_HEADS + NUM_KV_HEADS)[:, None] & (slot >= 0)
    is_value = is_head & is_value & (slot >= 0)
    slot_offset = slot * (NUM_KV_HEADS * HEAD_DIM)
    keys_ptr = key_cache_ptr + slot_offset + (heads - NUM_HEADS)[:, None] * HEAD_DIM
    values_ptr = value_cache_ptr + slot_offset + (heads - NUM_HEADS - NUM_KV_HEADS)[:, None] * HEAD_DIM
    query_type: tl.constexpr = qkv_ptr.dtype.element_ty
    tl.store(heads_ptr + half[None, :], rotated_first.to(query_type), mask=is_query & is_half[None, :])
    tl.store(heads_ptr + HALF + half[None, :], rotated_second.to(query_type), mask=is_query & is_half[None, :])
    if ROTATED_DIM < HEAD_DIM and HAS_NORM:
        tl.store(heads_ptr + rest_dims[None, :], rest.to(query_type), mask=is_query & is_rest[None, :])
    inverse = 1.0
    if scales_ptr is not None:
        largest = tl.maximum(tl.max(tl.abs(rotated_first), 1), tl.max(tl.abs(rotated_second), 1))
        if ROTATED_DIM < HEAD_DIM:
            largest = tl.maximum(largest, tl.max(tl.abs(rest), 1))
        scales, inverse = scales_of(largest, LARGEST)
        inverse = inverse[:, None]
        is_cached = (heads >= NUM_HEADS) & (heads < NUM_HEADS + 2 * NUM_KV_HEADS) & (slot >= 0)
        kind, kv_head = (heads - NUM_HEADS) // NUM_KV_HEADS, (heads - NUM_HEADS) % NUM_KV_HEADS
        rows = (slot // BLOCK_SIZE * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + slot % BLOCK_SIZE
        tl.store(scales_ptr + 2 * rows + kind, scales, mask=is_cached)
    first = to_cache(rotated_first * inverse, key_cache_ptr, LARGEST)
    second = to_cache(rotated_second * inverse, key_cache_ptr, LARGEST)
    tl.store(keys_ptr + half[None, :], first, mask=is_key & is_half[None, :])
    tl.store(keys_ptr + HALF + half[None, :], second, mask=is_key & is_half[None, :])
    tl.store(values_ptr + half[None, :], first, mask=is_value & is_half[None, :])
    tl.store(values_ptr + HALF + half[None, :], second, mask=is_value & is_half[None, :])
    if ROTATED_DIM < HEAD_DIM:
        rest = to_cache(rest * inverse, key_cache_ptr, LARGEST)
        tl.store(keys_ptr + rest_dims[None, :], rest, mask=is_key & is_rest[None, :])
        tl.store(values_ptr + rest_dims[None, :], rest, mask=is_value & is_rest[None, :])


def rope_kv_write_triton(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    head_norm: HeadNormWeights | None,
    gpu: Gpu,
    kv_scales: torch.Tensor | None = None,
    config: RopeConfig | None = None,
) -> torch.Tensor:
    """Do what `kernels.rope_kv_write.rope_kv_write` promises, launched by `config` or else by the table."""
    config = config or _CONFIGS[gpu.generation]
    num_tokens, num_all_heads, head_dim = qkv.shape
    num_kv_heads, rotated_dim = key_cache.shape[2], cos_sin.shape[1]
    num_heads = num_all_heads - 2 * num_kv_heads
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
        HEAD_DIM=head_dim,
        BLOCK_SIZE=key_cache.shape[1],
        LARGEST=LARGEST.get(key_cache.dtype, 0.0),
        ROTATED_DIM=rotated_dim,
        HAS_NORM=head_norm is not None,
        BLOCK_HEADS=block_heads,
        BLOCK_HALF=triton.next_power_of_2(rotated_dim // 2),
        BLOCK_REST=triton.next_power_of_2(max(head_dim - rotated_dim, 1)),
        num_warps=config.num_warps,
    )
    return qkv[:, :num_heads]
