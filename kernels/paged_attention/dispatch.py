"""Chooses the implementation of paged attention for the tensors at hand."""

from __future__ import annotations

import ctypes

import torch

from kernels.cpu_library import CACHE_DTYPE_NUMBERS, DTYPE_NUMBERS, CpuLibrary, cpu_library
from kernels.cpu_structures import AttentionStructure, address_of, strides_of
from kernels.gpu_config import gpu_of, is_triton_installed
from kernels.layer_cache import EVERY_TOKEN, can_transpose
from kernels.paged_attention.reference import Partial, paged_attention_reference

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
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    chunk_size: int | None = None,
    partial: Partial | None = None,
) -> torch.Tensor:
    """Compute what `kernels.paged_attention.paged_attention` promises; integer tensors are contiguous."""
    num_tokens, num_heads, head_dim = query.shape
    _, block_size, num_kv_heads, value_dim = value_cache.shape
    num_seqs, max_blocks = block_tables.shape
    token_stride, head_stride, element_stride = query.stride()
    if head_stride != head_dim or element_stride != 1:
        query = query.contiguous()
        token_stride = num_heads * head_dim
    result = torch.empty(num_tokens, num_heads, value_dim, dtype=query.dtype if partial is None else torch.float32)
    tokens, lse = (EVERY_TOKEN, None) if partial is None else (partial.tokens, partial.lse)
    arguments = AttentionStructure(
        *(query.data_ptr(), result.data_ptr(), key_cache.data_ptr(), value_cache.data_ptr(), address_of(kv_scales)),
        *(block_tables.data_ptr(), query_starts.data_ptr(), context_lens.data_ptr()),
        *(address_of(sinks), address_of(lse)),
        *(token_stride, strides_of(key_cache), strides_of(value_cache)),
        *(num_seqs, max_blocks, num_heads, num_kv_heads, head_dim, value_dim, block_size),
        *(sliding_window or 0, chunk_size or 0, tokens.first, tokens.step, scale, soft_cap or 0.0),
    )
    dtypes = DTYPE_NUMBERS[query.dtype], CACHE_DTYPE_NUMBERS[key_cache.dtype]
    library.paged_attention(ctypes.byref(arguments), *dtypes, torch.get_num_threads())
    return result


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    max_query_len: int,
    max_context_len: int,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    kv_scales: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    chunk_size: int | None = None,
    partial: Partial | None = None,
) -> torch.Tensor:
    """Attend from each query token to its sequence's cached tokens, causally.

    Sequence `s` owns query rows `query_starts[s] : query_starts[s + 1]`, which are its last tokens, ending at
    `context_lens[s]`; their keys and values must already be in the cache.

    Args:
        query: May be strided in its first dimension.
        key_cache: May be strided in all but its last dimension; on CPUs the tokens of a block may lie side by side
            instead.
        value_cache: May be strided in all but its last dimension; may be a part of the keys, such as their first
            numbers.
        block_tables: Blocks of each sequence, in order. Contiguous, as are all tensors below.
        query_starts: First query row of each sequence, then the number of rows.
        context_lens: Cached tokens of each sequence.
        max_query_len: Largest number of query rows of a sequence.
        max_context_len: Largest of `context_lens`.
        scale: Multiplies the scores.
        sliding_window: A query sees this many tokens at most, itself included; None is unlimited.
        soft_cap: Scores `s` become `soft_cap * tanh(s / soft_cap)`; None leaves them.
        kv_scales: Of a cache in eight bits (`kernels.layer_cache`); None of any other.
        sinks: For each head a logit without a value that joins the softmax, not scaled and not capped; None is none.
            Source: Xiao et al., arXiv 2309.17453, section 3.3, as gpt-oss has it.
        chunk_size: A query sees only the tokens of its own chunk, where chunks of this many tokens follow one another
            from the sequence's start; None is unlimited.
        partial: Where the cache has some tokens only, and others are attended to elsewhere: a block is then one of so
            many cached tokens, while `context_lens` counts all. The result is float32. Without sinks.

    Shapes:
        query: `[num_tokens, num_heads, head_dim]`
        key_cache: `[num_blocks, block_size, num_kv_heads, head_dim]`
        value_cache: `[num_blocks, block_size, num_kv_heads, value_dim]`
        block_tables: `[num_seqs, max_blocks]` int32
        query_starts: `[num_seqs + 1]` int32
        context_lens: `[num_seqs]` int32
        kv_scales: `[num_blocks, num_kv_heads, block_size, 2]` float16
        sinks: `[num_heads]` float32
        result: `[num_tokens, num_heads, value_dim]`
    """
    assert sinks is None or sinks.dtype is torch.float32
    if query.is_cuda and is_triton_installed():
        from kernels.paged_attention import triton_attention

        if triton_attention.can_run(query, value_cache):
            tensors = (query, key_cache, value_cache, block_tables, query_starts, context_lens, kv_scales)
            batch = triton_attention.PagedAttentionBatch(*tensors, sinks, partial)
            options = (scale, sliding_window, soft_cap, gpu_of(query.device))
            return triton_attention.paged_attention_triton(batch, max_query_len, *options, chunk_size=chunk_size)
    if can_run(query, key_cache, value_cache) and (library := cpu_library()) is not None:
        arguments = (query, key_cache, value_cache, block_tables, query_starts, context_lens)
        variant = (kv_scales, soft_cap, sinks, chunk_size, partial)
        return paged_attention_cpu(library, *arguments, scale, sliding_window, *variant)
    return paged_attention_reference(
        query,
        key_cache,
        value_cache,
        block_tables,
        query_starts,
        context_lens,
        max_query_len,
        max_context_len,
        scale,
        sliding_window,
        soft_cap,
        kv_scales,
        sinks,
        chunk_size,
        partial,
    )
