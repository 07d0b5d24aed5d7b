"""Chooses the implementation of paged attention for the tensors at hand."""

from __future__ import annotations

import ctypes

import torch

from kernels.cpu_library import CACHE_DTYPE_NUMBERS, DTYPE_NUMBERS, CpuLibrary, cpu_library
from kernels.cpu_structures import AttentionStructure, address_of, strides_of
from kernels.gpu_config import gpu_of, is_triton_installed
from kernels.layer_cache import EVERY_TOKEN, LayerCache, can_transpose
from kernels.paged_attention.options import AttentionOptions, Partial
from kernels.paged_attention.reference import paged_attention_reference

MAX_HEAD_DIM = 576
MAX_VALUE_DIM = 512


def can_run(query: torch.Tensor, cache: LayerCache) -> bool:
    """Return True where the kernel supports these shapes and types."""
    return (
        query.is_cpu
        and query.dtype in DTYPE_NUMBERS
        and cache.keys.dtype in CACHE_DTYPE_NUMBERS
        and query.shape[2] <= MAX_HEAD_DIM
        and cache.values.shape[3] <= MAX_VALUE_DIM
        and cache.values.stride(3) == 1
        and (cache.keys.stride(3) == 1 or _is_transposed(cache.keys))
    )


def _is_transposed(key_cache: torch.Tensor) -> bool:
    _, block_size, _, key_dim = key_cache.shape
    return key_cache.stride(1) == 1 and can_transpose(block_size, key_dim)


def paged_attention_cpu(
    library: CpuLibrary,
    query: torch.Tensor,
    cache: LayerCache,
    block_tables: torch.Tensor,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    options: AttentionOptions,
    partial: Partial | None = None,
) -> torch.Tensor:
    """Compute what `kernels.paged_attention.paged_attention` promises; integer tensors are contiguous."""
    num_tokens, num_heads, head_dim = query.shape
    _, block_size, num_kv_heads, value_dim = cache.values.shape
    num_seqs, max_blocks = block_tables.shape
    token_stride, head_stride, element_stride = query.stride()
    if head_stride != head_dim or element_stride != 1:
        query = query.contiguous()
        token_stride = num_heads * head_dim
    result = torch.empty(num_tokens, num_heads, value_dim, dtype=query.dtype if partial is None else torch.float32)
    tokens, lse, sinks = (EVERY_TOKEN, None, options.sinks) if partial is None else (partial.tokens, partial.lse, None)
    arguments = AttentionStructure(
        *(query.data_ptr(), result.data_ptr(), cache.keys.data_ptr(), cache.values.data_ptr()),
        *(address_of(cache.scales), block_tables.data_ptr(), query_starts.data_ptr(), context_lens.data_ptr()),
        *(address_of(sinks), address_of(lse)),
        *(token_stride, strides_of(cache.keys), strides_of(cache.values)),
        *(num_seqs, max_blocks, num_heads, num_kv_heads, head_dim, value_dim, block_size),
        *(options.sliding_window or 0, options.chunk_size or 0, tokens.first, tokens.step),
        *(options.scale, options.soft_cap or 0.0),
    )
    dtypes = DTYPE_NUMBERS[query.dtype], CACHE_DTYPE_NUMBERS[cache.keys.dtype]
    library.paged_attention(ctypes.byref(arguments), *dtypes, torch.get_num_threads())
    return result


def paged_attention(
    query: torch.Tensor,
    cache: LayerCache,
    block_tables: torch.Tensor,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    max_query_len: int,
    max_context_len: int,
    options: AttentionOptions,
    partial: Partial | None = None,
    *,
    in_chunks: bool = False,
) -> torch.Tensor:
    """Attend from each query token to its sequence's cached tokens, causally.

    Sequence `s` owns query rows `query_starts[s] : query_starts[s + 1]`, which are its last tokens, ending at
    `context_lens[s]`; their keys and values must already be in the cache.

    Args:
        query: May be strided in its first dimension.
        cache: Keys and values may be strided in all but their last dimension; on CPUs a block's keys may be contiguous
            along its tokens instead. Values may be a part of the keys, such as their first numbers.
        block_tables: Blocks of each sequence, in order. Contiguous, as are all tensors below.
        query_starts: First query row of each sequence, then the number of rows.
        context_lens: Cached tokens of each sequence.
        max_query_len: Largest number of query rows of a sequence.
        max_context_len: Largest of `context_lens`.
        options: Of the layer.
        partial: Where the cache has some tokens only, and others are attended to elsewhere: a block is then one of so
            many cached tokens, while `context_lens` counts all. The result is float32. Sinks are left to the merge.
        in_chunks: On GPUs the kernel of prompts takes all sequences, short ones too: one compiled kernel for any step.

    Shapes:
        query: `[num_tokens, num_heads, head_dim]`
        block_tables: `[num_seqs, max_blocks]` int32
        query_starts: `[num_seqs + 1]` int32
        context_lens: `[num_seqs]` int32
        result: `[num_tokens, num_heads, value_dim]`
    """
    tensors = (query, cache, block_tables, query_starts, context_lens)
    if query.is_cuda and is_triton_installed():
        from kernels.paged_attention import triton_attention

        if triton_attention.can_run(query, cache.values):
            batch = triton_attention.PagedAttentionBatch(*tensors, options, partial)
            gpu = gpu_of(query.device)
            return triton_attention.paged_attention_triton(batch, max_query_len, gpu, in_chunks=in_chunks)
    if can_run(query, cache) and (library := cpu_library()) is not None:
        return paged_attention_cpu(library, *tensors, options, partial)
    return paged_attention_reference(*tensors, max_query_len, max_context_len, options, partial)
