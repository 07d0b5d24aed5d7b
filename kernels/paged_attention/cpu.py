"""Paged attention by the compiled CPU kernel (`cpu.cpp`)."""

from __future__ import annotations

import ctypes

import torch

from kernels.cpu_library import CACHE_DTYPE_NUMBERS, DTYPE_NUMBERS, CpuLibrary
from kernels.cpu_structures import AttentionStructure, address_of, strides_of
from kernels.layer_cache import can_transpose

MAX_HEAD_DIM = 576
MAX_VALUE_DIM = 512


def can_run(query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor) -> bool:
    """Return True where the kernel supports these shapes and types."""
    return (
        query.is_cpu
        and query.dtype in DTYPE_NUMBERS
        and key_cache.dtype in CACHE_DTYPE_NUMBERS
        and query.shape[2] <= MAX_HEAD_DIM
        and value_cache.shape[3] <= MAX_VALUE_DIM
        and value_cache.stride(3) == 1
        and (key_cache.stride(3) == 1 or _is_transposed(key_cache))
    )


def _is_transposed(key_cache: torch.Tensor) -> bool:
    _, block_size, _, key_dim = key_cache.shape
    return key_cache.stride(1) == 1 and can_transpose(block_size, key_dim)


def paged_attention_cpu(
    library: CpuLibrary,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    sliding_window: int | None,
    kv_scales: torch.Tensor | None = None,
    tree_masks: torch.Tensor | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    chunk_size: int | None = None,
) -> torch.Tensor:
    """Compute what `kernels.paged_attention.paged_attention` promises; integer tensors are contiguous."""
    num_tokens, num_heads, head_dim = query.shape
    _, block_size, num_kv_heads, value_dim = value_cache.shape
    num_seqs, max_blocks = block_tables.shape
    token_stride, head_stride, element_stride = query.stride()
    if head_stride != head_dim or element_stride != 1:
        query = query.contiguous()
        token_stride = num_heads * head_dim
    result = torch.empty(num_tokens, num_heads, value_dim, dtype=query.dtype)
    arguments = AttentionStructure(
        query.data_ptr(),
        result.data_ptr(),
        key_cache.data_ptr(),
        value_cache.data_ptr(),
        address_of(kv_scales),
        block_tables.data_ptr(),
        query_starts.data_ptr(),
        context_lens.data_ptr(),
        address_of(tree_masks),
        address_of(sinks),
        token_stride,
        strides_of(key_cache),
        strides_of(value_cache),
        num_seqs,
        max_blocks,
        num_heads,
        num_kv_heads,
        head_dim,
        value_dim,
        block_size,
        sliding_window or 0,
        chunk_size or 0,
        scale,
        soft_cap or 0.0,
    )
    dtypes = DTYPE_NUMBERS[query.dtype], CACHE_DTYPE_NUMBERS[key_cache.dtype]
    library.paged_attention(ctypes.byref(arguments), *dtypes, torch.get_num_threads())
    return result
