"""Makes paged attention inputs whose unused cache slots are NaN."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from kernels.layer_cache import LayerCache, is_quantized, quantize_heads, scales_shape
from kernels.paged_attention import AttentionOptions, Partial

if TYPE_CHECKING:
    from kernels.paged_attention.triton_attention import PagedAttentionBatch


@dataclass(frozen=True)
class Shape:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype | None = None
    # Of a value head, where it is not that of a key head.
    value_dim: int | None = None
    # Values are the first numbers of the keys.
    is_latent: bool = False
    # Blocks, tokens and heads of the caches lie apart.
    is_strided: bool = False


@dataclass
class PagedBatch:
    query: torch.Tensor
    cache: LayerCache
    block_tables: torch.Tensor
    query_starts: torch.Tensor
    context_lens: torch.Tensor
    max_query_len: int
    max_context_len: int
    scale: float

    @property
    def tensors(self) -> tuple[Any, ...]:
        """Those that all implementations take, in their order."""
        return self.query, self.cache, self.block_tables, self.query_starts, self.context_lens

    def arguments(self, sliding_window: int | None = None, soft_cap: float | None = None, **others: Any) -> tuple:
        """All that `paged_attention` takes, in its order."""
        options = AttentionOptions(self.scale, sliding_window, soft_cap, **others)
        return *self.tensors, self.max_query_len, self.max_context_len, options

    def moved(self, device: torch.device, partial: Partial | None = None, **asked: Any) -> PagedAttentionBatch:
        """Return what the Triton kernels take, with these fields of `AttentionOptions`."""
        from kernels.paged_attention.triton_attention import PagedAttentionBatch

        cache, scales, sinks = self.cache, self.cache.scales, asked.pop("sinks", None)
        keys = cache.keys.to(device)
        values = keys[..., : cache.values.shape[3]] if cache.is_latent else cache.values.to(device)
        return PagedAttentionBatch(
            self.query.to(device),
            LayerCache(keys, values, None if scales is None else scales.to(device), cache.is_latent),
            *(tensor.to(device) for tensor in (self.block_tables, self.query_starts, self.context_lens)),
            AttentionOptions(self.scale, sinks=None if sinks is None else sinks.to(device), **asked),
            None if partial is None else replace(partial, lse=partial.lse.to(device)),
        )


@dataclass
class PagedSequence:
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor


def make_sequence(context_len: int, shape: Shape, seed: int) -> PagedSequence:
    """All tokens of a sequence, a query for each."""
    generator = torch.Generator().manual_seed(seed)

    def rand(num_heads: int, size: int = shape.head_dim) -> torch.Tensor:
        return torch.randn(context_len, num_heads, size, generator=generator)

    value_dim = shape.value_dim or shape.head_dim
    query, key = rand(shape.num_heads), rand(shape.num_kv_heads)
    return PagedSequence(query, key, key[..., :value_dim] if shape.is_latent else rand(shape.num_kv_heads, value_dim))


def make_batch(sequences: list[PagedSequence], query_lens: list[int], shape: Shape, seed: int = 0) -> PagedBatch:
    """Lay the sequences' keys and values into shuffled blocks, and take each one's last queries."""
    size = shape.block_size
    lengths = [len(sequence.key) for sequence in sequences]
    num_blocks = [-(-length // size) for length in lengths]
    order = torch.randperm(sum(num_blocks) + 3, generator=torch.Generator().manual_seed(seed))
    cache_dtype = shape.cache_dtype or shape.dtype
    caches = _poisoned_caches(len(order), shape, cache_dtype)
    scales = torch.full(scales_shape(len(order), size, shape.num_kv_heads), float("nan"), dtype=torch.float16)
    tables = torch.zeros(len(sequences), max(num_blocks), dtype=torch.int32)
    taken = 0
    for row, (sequence, count) in enumerate(zip(sequences, num_blocks, strict=True)):
        blocks = order[taken : taken + count]
        taken += count
        tables[row, :count] = blocks
        positions = torch.arange(len(sequence.key))
        slots = (blocks[positions // size], positions % size)
        for kind, heads in enumerate((sequence.key, sequence.value)):
            if kind and shape.is_latent:
                scales[slots[0], :, slots[1], 1] = scales[slots[0], :, slots[1], 0]
            elif is_quantized(cache_dtype):
                caches[kind][slots], scales[slots[0], :, slots[1], kind] = quantize_heads(heads, cache_dtype)
            else:
                caches[kind][slots] = heads.to(cache_dtype)
    query = torch.cat([s.query[-count:] for s, count in zip(sequences, query_lens, strict=True)])
    return PagedBatch(
        query.to(shape.dtype),
        LayerCache(*caches, scales if is_quantized(cache_dtype) else None, shape.is_latent),
        tables,
        torch.tensor([0, *query_lens]).cumsum(0).int(),
        torch.tensor(lengths, dtype=torch.int32),
        max(query_lens),
        max(lengths),
        shape.head_dim**-0.5,
    )


def _poisoned_caches(num_blocks: int, shape: Shape, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Make keys and values of NaN, or of 77 where there is no NaN."""

    def poisoned(head_dim: int) -> torch.Tensor:
        gap = 1 if shape.is_strided else 0
        heads = (shape.num_kv_heads + gap, head_dim + 8 * gap)
        cache = torch.full((num_blocks, shape.block_size + gap, *heads), float("nan"))
        cache = (cache.nan_to_num(77) if dtype == torch.int8 else cache).to(dtype)
        return cache[:, : shape.block_size, : shape.num_kv_heads, :head_dim]

    keys, value_dim = poisoned(shape.head_dim), shape.value_dim or shape.head_dim
    return keys, keys[..., :value_dim] if shape.is_latent else poisoned(value_dim)
