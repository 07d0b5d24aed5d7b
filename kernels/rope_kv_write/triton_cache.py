# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Writing into the KV cache on a GPU: where slots lie, and how numbers become those of the cache."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.layer_cache import LARGEST


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


def write_values(
    values: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_scales: torch.Tensor | None,
    max_block_heads: int,
    num_warps: int,
) -> None:
    """Launch `write_values_kernel` for `values: [num_tokens, num_kv_heads, value_dim]`."""
    num_tokens, num_kv_heads, value_dim = values.shape
    values = values if values.stride()[1:] == (value_dim, 1) else values.contiguous()
    block_heads = min(max_block_heads, triton.next_power_of_2(num_kv_heads))
    write_values_kernel[(num_tokens, triton.cdiv(num_kv_heads, block_heads))](
        *(values, value_cache, slot_mapping, kv_scales, values.stride(0)),
        NUM_KV_HEADS=num_kv_heads,
        VALUE_DIM=value_dim,
        BLOCK_HEADS=block_heads,
        BLOCK_D=triton.next_power_of_2(value_dim),
        num_warps=num_warps,
        **cache_constants(value_cache),
        **cache_strides("VALUE", value_cache),
    )


def cache_constants(cache: torch.Tensor | None) -> dict[str, float]:
    """Return what kernels know of a cache when they are compiled; None is not a cache."""
    if cache is None:
        return {"BLOCK_SIZE": 1, "LARGEST": 0.0}
    return {"BLOCK_SIZE": cache.shape[1], "LARGEST": LARGEST.get(cache.dtype, 0.0)}


def cache_strides(kind: str, cache: torch.Tensor | None) -> dict[str, int]:
    """Return the strides of a cache by the names that kernels have for those of its kind, KEY or VALUE."""
    names = [f"{kind}_{part}_STRIDE" for part in ("BLOCK", "TOKEN", "HEAD")]
    return dict(zip(names, (0, 0, 0) if cache is None else cache.stride()[:3], strict=True))
