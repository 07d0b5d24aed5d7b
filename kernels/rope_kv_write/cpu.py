"""Rotation and KV write by the compiled CPU kernel (`cpu.cpp`)."""

from __future__ import annotations

import ctypes

import torch

from kernels.cpu_library import CACHE_DTYPE_NUMBERS, DTYPE_NUMBERS, CpuLibrary
from kernels.cpu_structures import RotationStructure
from kernels.rope_kv_write.reference import HeadNormWeights

MAX_HEAD_DIM = 256


def can_run(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    key_cache: torch.Tensor,
    head_norm: HeadNormWeights | None,
) -> bool:
    """Return True where the kernel supports these types and layouts: each token's heads lie in one piece."""
    return (
        qkv.is_cpu
        and qkv.dtype in DTYPE_NUMBERS
        and key_cache.dtype in CACHE_DTYPE_NUMBERS
        and positions.dtype is torch.int64
        and cos_sin.dtype is torch.float32
        and qkv.shape[2] <= MAX_HEAD_DIM
        and qkv.stride(1) == qkv.shape[2]
        and qkv.stride(2) == 1
        and (head_norm is None or head_norm.query.dtype is head_norm.key.dtype is qkv.dtype)
    )


def rope_kv_write_cpu(
    library: CpuLibrary,
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    head_norm: HeadNormWeights | None = None,
    kv_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Do what `kernels.rope_kv_write.rope_kv_write` promises."""
    num_tokens, num_all_heads, head_dim = qkv.shape
    num_kv_heads = key_cache.shape[2]
    num_heads = num_all_heads - 2 * num_kv_heads
    arguments = RotationStructure(
        qkv.data_ptr(),
        positions.data_ptr(),
        cos_sin.data_ptr(),
        key_cache.data_ptr(),
        value_cache.data_ptr(),
        None if kv_scales is None else kv_scales.data_ptr(),
        slot_mapping.data_ptr(),
        None if head_norm is None else head_norm.query.data_ptr(),
        None if head_norm is None else head_norm.key.data_ptr(),
        qkv.stride(0),
        num_heads,
        num_kv_heads,
        head_dim,
        cos_sin.shape[1],
        num_tokens,
        key_cache.shape[1],
        0.0 if head_norm is None else head_norm.eps,
    )
    dtypes = DTYPE_NUMBERS[qkv.dtype], CACHE_DTYPE_NUMBERS[key_cache.dtype]
    library.rope_kv_write(ctypes.byref(arguments), *dtypes, torch.get_num_threads())
    return qkv[:, :num_heads]
