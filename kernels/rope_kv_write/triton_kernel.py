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
def slot_offset(slot, BLOCK_SIZE: tl.constexpr, BLOCK_STRIDE: tl.constexpr, TOKEN_STRIDE: tl.constexpr):
    """Return where a slot's first head lies in a cache."""
    return slot // BLOCK_SIZE * BLOCK_STRIDE + slot % BLOCK_SIZE * TOKEN_STRIDE


@triton.jit
def write_values_kernel(
    values_ptr,
    value_cache_ptr,
    slot_mapping_ptr,
    scales_ptr,
    values_stride,
    NUM_KV_HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    VALUE_BLOCK_STRIDE: tl.constexpr,
    VALUE_TOKEN_STRIDE: tl.constexpr,
    VALUE_HEAD_STRIDE: tl.constexpr,
    LARGEST: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Write value heads of a size of their own, BLOCK_HEADS of one token; `grid: (num_tokens, blocks of heads)`."""
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    dims = tl.arange(0, BLOCK_D)
    slot = tl.load(slot_mapping_ptr + token)
    is_head = (heads < NUM_KV_HEADS) & (slot >= 0)
    mask = is_head[:, None] & (dims < VALUE_DIM)[None, :]
    values_ptr += token * values_stride
    x = tl.load(values_ptr + heads[:, None] * VALUE_DIM + dims[None, :], mask=mask, other=0.0).to(tl.float32)
    if scales_ptr is not None:
        scales, inverse = scales_of(tl.max(tl.abs(x), 1), LARGEST)
        x *= inverse[:, None]
        rows = (slot // BLOCK_SIZE * NUM_KV_HEADS + heads) * BLOCK_SIZE + slot % BLOCK_SIZE
        tl.store(scales_ptr + 2 * rows + 1, scales, mask=is_head)
    value_cache_ptr += slot_offset(slot, BLOCK_SIZE, VALUE_BLOCK_STRIDE, VALUE_TOKEN_STRIDE)
    offsets = heads[:, None] * VALUE_HEAD_STRIDE + dims[None, :]
    tl.store(value_cache_ptr + offsets, to_cache(x, value_cache_ptr, LARGEST), mask=mask)


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
def store_parts(heads_ptr, first, second, rest, first_dims, second_dims, rest_dims, is_head, is_half, is_rest):
    """Store the parts of heads; `rest` is None where there is none, or it stands there already."""
    tl.store(heads_ptr + first_dims[None, :], first, mask=is_head & is_half[None, :])
    tl.store(heads_ptr + second_dims[None, :], second, mask=is_head & is_half[None, :])
    if rest is not None:
        tl.store(heads_ptr + rest_dims[None, :], rest, mask=is_head & is_rest[None, :])


@triton.jit
def write_parts(
    first,
    second,
    rest,
    first_dims,
    second_dims,
    rest_dims,
    is_half,
    is_rest,
    kv_heads,
    slot,
    key_cache_ptr,
    value_cache_ptr,
    scales_ptr,
    NUM_KV_HEADS: tl.constexpr,
    NUM_VALUE_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEY_BLOCK_STRIDE: tl.constexpr,
    KEY_TOKEN_STRIDE: tl.constexpr,
    KEY_HEAD_STRIDE: tl.constexpr,
    VALUE_BLOCK_STRIDE: tl.constexpr,
    VALUE_TOKEN_STRIDE: tl.constexpr,
    VALUE_HEAD_STRIDE: tl.constexpr,
    LARGEST: tl.constexpr,
):
    """Write the key heads, and behind them the value heads, of a token into its slot, by their numbers `kv_heads`."""
    is_key = ((kv_heads >= 0) & (kv_heads < NUM_KV_HEADS) & (slot >= 0))[:, None]
    is_value = ((kv_heads >= NUM_KV_HEADS) & (kv_heads < NUM_KV_HEADS + NUM_VALUE_HEADS) & (slot >= 0))[:, None]
    if scales_ptr is not None:
        largest = tl.maximum(tl.max(tl.abs(first), 1), tl.max(tl.abs(second), 1))
        if rest is not None:
            largest = tl.maximum(largest, tl.max(tl.abs(rest), 1))
        scales, inverse = scales_of(largest, LARGEST)
        first *= inverse[:, None]
        second *= inverse[:, None]
        if rest is not None:
            rest *= inverse[:, None]
        is_cached = (kv_heads >= 0) & (kv_heads < NUM_KV_HEADS + NUM_VALUE_HEADS) & (slot >= 0)
        kind, kv_head = kv_heads // NUM_KV_HEADS, kv_heads % NUM_KV_HEADS
        rows = (slot // BLOCK_SIZE * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + slot % BLOCK_SIZE
        tl.store(scales_ptr + 2 * rows + kind, scales, mask=is_cached)
        if value_cache_ptr is None:
            tl.store(scales_ptr + 2 * rows + 1, scales, mask=is_cached)
    first = to_cache(first, key_cache_ptr, LARGEST)
    second = to_cache(second, key_cache_ptr, LARGEST)
    if rest is not None:
        rest = to_cache(rest, key_cache_ptr, LARGEST)
    keys_ptr = key_cache_ptr + slot_offset(slot, BLOCK_SIZE, KEY_BLOCK_STRIDE, KEY_TOKEN_STRIDE)
    keys_ptr += kv_heads[:, None] * KEY_HEAD_STRIDE
    store_parts(keys_ptr, first, second, rest, first_dims, second_dims, rest_dims, is_key, is_half, is_rest)
    if NUM_VALUE_HEADS > 0:
        values_ptr = value_cache_ptr + slot_offset(slot, BLOCK_SIZE, VALUE_BLOCK_STRIDE, VALUE_TOKEN_STRIDE)
        values_ptr += (kv_heads - NUM_KV_HEADS)[:, None] * VALUE_HEAD_STRIDE
        store_parts(values_ptr, first, second, rest, first_dims, second_dims, rest_dims, is_value, is_half, is_rest)


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
    NUM_VALUE_HEADS is zero where the values are a part of the keys, or written by `write_values_kernel`.
    """
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
    # Beyond the end where the head ends with what is rotated.
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
    turned_first = first * cos - second * sin
    turned_second = second * cos + first * sin

    query_type: tl.constexpr = qkv_ptr.dtype.element_ty
    kept = None
    if HAS_NORM and rest is not None:
        kept = rest.to(query_type)
    store_parts(
        heads_ptr, turned_first.to(query_type), turned_second.to(query_type), kept,
        first_dims, second_dims, rest_dims, is_query, is_half, is_rest,
    )  # fmt: skip
    if key_cache_ptr is not None:
        write_parts(
            turned_first, turned_second, rest, first_dims, second_dims, rest_dims, is_half, is_rest, heads - NUM_HEADS,
            tl.load(slot_mapping_ptr + token), key_cache_ptr, value_cache_ptr, scales_ptr, NUM_KV_HEADS,
            NUM_VALUE_HEADS, BLOCK_SIZE, KEY_BLOCK_STRIDE, KEY_TOKEN_STRIDE, KEY_HEAD_STRIDE, VALUE_BLOCK_STRIDE,
            VALUE_TOKEN_STRIDE, VALUE_HEAD_STRIDE, LARGEST,
        )  # fmt: skip


def rope_kv_write_triton(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor | None,
    key_cache: torch.Tensor | None,
    value_cache: torch.Tensor | None,
    slot_mapping: torch.Tensor,
    head_norm: HeadNormWeights | None,
    gpu: Gpu,
    kv_scales: torch.Tensor | None = None,
    values: torch.Tensor | None = None,
    first_rotated: int = 0,
    is_interleaved: bool = False,
    config: RopeConfig | None = None,
) -> torch.Tensor:
    """Do what `kernels.rope_kv_write.rope_kv_write` promises, launched by `config` or else by the table."""
    config = config or _CONFIGS[gpu.generation]
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
        **_cache_constants(key_cache),
        **_strides("KEY", key_cache),
        **_strides("VALUE", value_cache),
    )
    if value_cache is not None and values is not None:
        _write_values(values, value_cache, slot_mapping, kv_scales, config)
    return qkv[:, :num_heads]


def _write_values(
    values: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_scales: torch.Tensor | None,
    config: RopeConfig,
) -> None:
    num_tokens, num_kv_heads, value_dim = values.shape
    values = values if values.stride()[1:] == (value_dim, 1) else values.contiguous()
    block_heads = min(config.block_heads, triton.next_power_of_2(num_kv_heads))
    write_values_kernel[(num_tokens, triton.cdiv(num_kv_heads, block_heads))](
        *(values, value_cache, slot_mapping, kv_scales, values.stride(0)),
        NUM_KV_HEADS=num_kv_heads,
        VALUE_DIM=value_dim,
        BLOCK_HEADS=block_heads,
        BLOCK_D=triton.next_power_of_2(value_dim),
        num_warps=config.num_warps,
        **_cache_constants(value_cache),
        **_strides("VALUE", value_cache),
    )


def _cache_constants(cache: torch.Tensor | None) -> dict[str, float]:
    if cache is None:
        return {"BLOCK_SIZE": 1, "LARGEST": 0.0}
    return {"BLOCK_SIZE": cache.shape[1], "LARGEST": LARGEST.get(cache.dtype, 0.0)}


def _strides(kind: str, cache: torch.Tensor | None) -> dict[str, int]:
    names = [f"{kind}_{part}_STRIDE" for part in ("BLOCK", "TOKEN", "HEAD")]
    return dict(zip(names, (0, 0, 0) if cache is None else cache.stride()[:3], strict=True))
