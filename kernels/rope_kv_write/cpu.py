"""Rotation and KV write by the compiled CPU kernel (`cpu.cpp`)."""

from __future__ import annotations

import ctypes

import torch

from kernels.cpu_library import CACHE_DTYPE_NUMBERS, DTYPE_NUMBERS, CpuLibrary
from kernels.cpu_structures import RotationStructure, StridesStructure, address_of, strides_of
from kernels.rope_kv_write.reference import HeadNormWeights

MAX_HEAD_DIM = 576


def can_run(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor | None,
    key_cache: torch.Tensor | None,
    value_cache: torch.Tensor | None,
    head_norm: HeadNormWeights | None,
    values: torch.Tensor | None = None,
) -> bool:
    """Return True where the kernel supports these types and layouts: each token's heads lie in one piece."""
    caches = [cache for cache in (key_cache, value_cache) if cache is not None]
    return (
        qkv.is_cpu
        and qkv.dtype in DTYPE_NUMBERS
        and all(cache.dtype in CACHE_DTYPE_NUMBERS and cache.shape[3] <= MAX_HEAD_DIM for cache in caches)
        and (value_cache is None or value_cache.stride(3) == 1)
        and positions.dtype is torch.int64
        and (cos_sin is None or cos_sin.dtype is torch.float32)
        and qkv.shape[2] <= MAX_HEAD_DIM
        and is_whole(qkv)
        and (values is None or (is_whole(values) and values.dtype is qkv.dtype))
        and (head_norm is None or head_norm.query.dtype is head_norm.key.dtype is qkv.dtype)
    )


def is_whole(heads: torch.Tensor) -> bool:
    """Return True where the heads of each token lie side by side."""
    return heads.stride(1) == heads.shape[2] and heads.stride(2) == 1


def rope_kv_write_cpu(
    library: CpuLibrary,
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
) -> torch.Tensor:
    """Do what `kernels.rope_kv_write.rope_kv_write` promises."""
    num_tokens, num_all_heads, head_dim = qkv.shape
    num_kv_heads = 0 if key_cache is None else key_cache.shape[2]
    has_values = value_cache is not None and values is None
    num_heads = num_all_heads - (2 if has_values else 1) * num_kv_heads
    none = StridesStructure()
    arguments = RotationStructure(
        qkv.data_ptr(),
        address_of(values),
        positions.data_ptr(),
        address_of(cos_sin),
        address_of(key_cache),
        address_of(value_cache),
        address_of(kv_scales),
        slot_mapping.data_ptr(),
        address_of(None if head_norm is None else head_norm.query),
        address_of(None if head_norm is None else head_norm.key),
        qkv.stride(0),
        0 if values is None else values.stride(0),
        none if key_cache is None else strides_of(key_cache),
        none if value_cache is None else strides_of(value_cache),
        num_heads,
        num_kv_heads,
        head_dim,
        0 if cos_sin is None else cos_sin.shape[1],
        first_rotated,
        is_interleaved,
        0 if value_cache is None else value_cache.shape[3],
        num_tokens,
        1 if key_cache is None else key_cache.shape[1],
        0.0 if head_norm is None else head_norm.eps,
    )
    cache_dtype = qkv.dtype if key_cache is None else key_cache.dtype
    dtypes = DTYPE_NUMBERS[qkv.dtype], CACHE_DTYPE_NUMBERS[cache_dtype]
    library.rope_kv_write(ctypes.byref(arguments), *dtypes, torch.get_num_threads())
    return qkv[:, :num_heads]
