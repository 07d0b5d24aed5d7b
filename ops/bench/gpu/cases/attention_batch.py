"""Sequences of paged attention, in all its forms, that the cases of `attention` are made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from kernels.gpu_config import gpu_of
from kernels.layer_cache import LayerCache, is_quantized, quantize_heads
from kernels.paged_attention import AttentionOptions, paged_attention
from kernels.paged_attention.triton_config import ChunkConfig, SplitConfig
from ops.bench.gpu.case import Entry
from ops.bench.gpu.shapes import ModelShape

BLOCK_SIZE = 16
Lengths = list[tuple[int, int]]
"""Of each sequence its query tokens, and its cached tokens, these among them."""


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The attention of one model's layers.

    Attributes:
        latent_dim: Where one row of a token is both key and value, how many of its first numbers are the value.
        scale_dim: Size whose root divides the scores; None is `head_dim`.
    """

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    latent_dim: int | None = None
    scale_dim: int | None = None
    sliding_window: int | None = None
    soft_cap: float | None = None
    has_sinks: bool = False

    @classmethod
    def of(cls, model: ModelShape) -> AttentionShape:
        """Return that of a dense model."""
        return cls(model.name, model.num_heads, model.num_kv_heads, model.head_dim)

    @property
    def numbers_per_token(self) -> int:
        """Return the numbers cached per token."""
        return self.num_kv_heads * (self.head_dim if self.latent_dim else 2 * self.head_dim)

    def seen(self, query: int, context: int) -> tuple[int, int]:
        """Return how many tokens a sequence reads, and how many pairs of a query and a token it multiplies."""
        window = self.sliding_window or context
        pairs = sum(min(position + 1, window) for position in range(context - query, context))
        return min(context, window + query - 1), pairs


@dataclass(frozen=True, slots=True)
class Batch:
    """Sequences whose blocks are scattered over a cache with NaN where nothing lies."""

    shape: AttentionShape
    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    block_tables: torch.Tensor
    query_starts: torch.Tensor
    context_lens: torch.Tensor
    max_query_len: int
    max_context_len: int
    sinks: torch.Tensor | None = None
    kv_scales: torch.Tensor | None = None

    @property
    def scale(self) -> float:
        """What multiplies the scores."""
        return float((self.shape.scale_dim or self.shape.head_dim) ** -0.5)

    def attend(self, attend: Callable[..., torch.Tensor] | None = None, entry: Entry | None = None) -> torch.Tensor:
        """Run our op, or another implementation; on a GPU launched by an entry where one is given."""
        if entry is not None and self.query.device.type == "cuda":
            return self._launch(entry)
        return (attend or paged_attention)(*(*self._tensors, self.max_query_len, self.max_context_len, self._options))

    @property
    def _tensors(self) -> tuple[torch.Tensor, LayerCache, torch.Tensor, torch.Tensor, torch.Tensor]:
        cache = LayerCache(self.key_cache, self.value_cache, self.kv_scales)
        return self.query, cache, self.block_tables, self.query_starts, self.context_lens

    @property
    def _options(self) -> AttentionOptions:
        return AttentionOptions(self.scale, self.shape.sliding_window, self.shape.soft_cap, self.sinks)

    def _launch(self, entry: Entry) -> torch.Tensor:
        from kernels.paged_attention.triton_attention import PagedAttentionBatch, paged_attention_triton

        # Only the kernel for many query tokens divides them into blocks.
        split, chunk = (None, ChunkConfig(**entry)) if "block_m" in entry else (SplitConfig(**entry), None)
        batch = PagedAttentionBatch(*self._tensors, replace(self._options, sinks=None))
        return paged_attention_triton(batch, self.max_query_len, gpu_of(self.query.device), split, chunk)

    def plain(self) -> Batch:
        """Return the same batch without sinks and cap."""
        return replace(self, shape=replace(self.shape, soft_cap=None), sinks=None)

    def with_cache_in(self, dtype: torch.dtype) -> Batch:
        """Return the same batch on a KV cache of eight bits, quantized; or as it is, where `dtype` has more."""
        if not is_quantized(dtype):
            return self
        (keys, key_scales), (values, value_scales) = (
            quantize_heads(cache, dtype) for cache in (self.key_cache, self.value_cache)
        )
        scales = torch.stack((key_scales, value_scales), dim=-1).transpose(1, 2).contiguous()
        return replace(self, key_cache=keys, value_cache=values, kv_scales=scales)


def make_batch(device: torch.device, shape: AttentionShape, lengths: Lengths, block_size: int = BLOCK_SIZE) -> Batch:
    """Make random sequences."""
    blocks = [-(-context // block_size) for _, context in lengths]
    order = torch.randperm(sum(blocks) + 1, device=device).int()

    def randn(*size: int) -> torch.Tensor:
        return torch.randn(*size, shape.head_dim, device=device, dtype=torch.bfloat16)

    caches = randn(1 if shape.latent_dim else 2, len(order), block_size, shape.num_kv_heads)
    tables = torch.zeros(len(lengths), max(blocks), dtype=torch.int32, device=device)
    for row, (part, (_, context)) in enumerate(zip(torch.split(order[:-1], blocks), lengths, strict=True)):
        tables[row, : len(part)] = part
        if context % block_size:
            caches[:, part[-1], context % block_size :] = float("nan")
    caches[:, order[-1]] = float("nan")
    queries = [query for query, _ in lengths]
    return Batch(
        shape,
        randn(sum(queries), shape.num_heads),
        caches[0],
        caches[0][..., : shape.latent_dim] if shape.latent_dim else caches[1],
        tables,
        torch.tensor([0, *queries], dtype=torch.int32).cumsum(0).int().to(device),
        torch.tensor([context for _, context in lengths], dtype=torch.int32, device=device),
        max(queries),
        max(context for _, context in lengths),
        torch.randn(shape.num_heads, device=device) if shape.has_sinks else None,
    )
