"""Paged attention beyond the plain form: sinks, soft caps, and a latent row a token, each beside our own without it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from kernels.paged_attention import paged_attention
from kernels.paged_attention.reference import paged_attention_reference
from ops.bench.gpu.case import OURS, Candidate, Case, CaseSpec, Check, OpSuite, relative_error, sets_for

BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class VariantShape:
    """The attention of one model's layers.

    Attributes:
        value_dim: Of a value; with `is_latent` values are that many first numbers of the keys.
        scale: Multiplies the scores.
    """

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    scale: float
    is_latent: bool = False
    sliding_window: int | None = None
    soft_cap: float | None = None
    has_sinks: bool = False

    @property
    def bytes_per_token(self) -> int:
        """Return what is kept of a token, in 16 bits."""
        return 2 * self.num_kv_heads * (self.head_dim + (0 if self.is_latent else self.value_dim))


GPT_OSS = VariantShape("gpt-oss-20b", 64, 8, 64, 64, 64**-0.5, has_sinks=True)
GPT_OSS_WINDOW = VariantShape("gpt-oss-20b window", 64, 8, 64, 64, 64**-0.5, sliding_window=128, has_sinks=True)
GEMMA2_9B = VariantShape("Gemma-2-9B", 16, 8, 256, 256, 256**-0.5, soft_cap=50.0)
DEEPSEEK_V2_LITE = VariantShape("DeepSeek-V2-Lite", 16, 1, 576, 512, 192**-0.5, is_latent=True)
DEEPSEEK_V3 = VariantShape("DeepSeek-V3", 128, 1, 576, 512, 192**-0.5, is_latent=True)


@dataclass(frozen=True, slots=True)
class VariantBatch:
    """Sequences by (query tokens, cached tokens), their blocks scattered over a cache."""

    shape: VariantShape
    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    block_tables: torch.Tensor
    query_starts: torch.Tensor
    context_lens: torch.Tensor
    max_query_len: int
    max_context_len: int
    sinks: torch.Tensor | None

    def attend(self, attend: Callable[..., torch.Tensor] = paged_attention, *, is_plain: bool = False) -> torch.Tensor:
        """Run an implementation; `is_plain` leaves sinks and cap out."""
        shape, caches = self.shape, (self.key_cache, self.value_cache)
        return attend(
            *(self.query, *caches, self.block_tables, self.query_starts, self.context_lens),
            *(self.max_query_len, self.max_context_len, shape.scale, shape.sliding_window),
            None if is_plain else shape.soft_cap,
            sinks=None if is_plain else self.sinks,
        )


def make_variant_batch(device: torch.device, shape: VariantShape, lengths: list[tuple[int, int]]) -> VariantBatch:
    """Make a batch of (query tokens, cached tokens)."""
    blocks = [-(-context // BLOCK_SIZE) for _, context in lengths]
    order = torch.randperm(sum(blocks), device=device).int()

    def cache(size: int) -> torch.Tensor:
        return torch.randn(len(order), BLOCK_SIZE, shape.num_kv_heads, size, device=device, dtype=torch.bfloat16)

    keys = cache(shape.head_dim)
    tables = torch.zeros(len(lengths), max(blocks), dtype=torch.int32, device=device)
    for row, part in enumerate(torch.split(order, blocks)):
        tables[row, : len(part)] = part
    queries = [query for query, _ in lengths]
    return VariantBatch(
        shape,
        torch.randn(sum(queries), shape.num_heads, shape.head_dim, device=device, dtype=torch.bfloat16),
        keys,
        keys[..., : shape.value_dim] if shape.is_latent else cache(shape.value_dim),
        tables,
        torch.tensor([0, *queries], dtype=torch.int32).cumsum(0).int().to(device),
        torch.tensor([context for _, context in lengths], dtype=torch.int32, device=device),
        max(queries),
        max(context for _, context in lengths),
        torch.randn(shape.num_heads, device=device) if shape.has_sinks else None,
    )


def variant_error(device: torch.device, shape: VariantShape, lengths: list[tuple[int, int]]) -> float:
    """Compare with the reference."""
    batch = make_variant_batch(device, shape, lengths)
    return relative_error(batch.attend(), batch.attend(paged_attention_reference))


def variant_case(device: torch.device, shape: VariantShape, lengths: list[tuple[int, int]]) -> Case:
    """Read what each sequence keeps, or its window of it, once; two products over the pairs that are seen."""
    seen = [min(context, shape.sliding_window or context) for _, context in lengths]
    num_bytes = sum(seen) * shape.bytes_per_token
    pairs = sum(query * count for (query, _), count in zip(lengths, seen, strict=True))
    num_sets = sets_for(num_bytes)
    batches = [make_variant_batch(device, shape, lengths) for _ in range(num_sets)]
    candidates: dict[str, Candidate] = {OURS: partial(_attend_one, batches, False)}
    if shape.is_latent:
        copies = [replace(batch, value_cache=batch.value_cache.clone()) for batch in batches]
        candidates[f"{OURS}/values read again"] = partial(_attend_one, copies, False)
    else:
        candidates[f"{OURS}/plain"] = partial(_attend_one, batches, True)
    queries = sum(query for query, _ in lengths)
    num_bytes += 2 * queries * shape.num_heads * (shape.head_dim + shape.value_dim)
    return Case(num_bytes, 2 * pairs * shape.num_heads * (shape.head_dim + shape.value_dim), num_sets, candidates)


def _attend_one(batches: list[VariantBatch], is_plain: bool, index: int) -> torch.Tensor:
    return batches[index].attend(is_plain=is_plain)


def _spec(shape: VariantShape, num_seqs: int, context: int, num_queries: int = 1) -> CaseSpec:
    label = f"{shape.name} {num_seqs} x {context}" + (f", {num_queries} new" if num_queries > 1 else "")
    return CaseSpec(label, partial(variant_case, shape=shape, lengths=[(num_queries, context)] * num_seqs))


_CHECKED = {
    "decodes": [(1, 1), (1, 777), (1, 4096)],
    "mixed": [(1, 700), (200, 200), (65, 1000)],
    "verified drafts": [(5, 300), (5, 1029)],
}
ATTENTION_FORMS = OpSuite(
    "attention_forms",
    lambda device: [
        Check(f"{shape.name} {name}", partial(variant_error, device, shape, lengths), 1e-2)
        for shape in (GPT_OSS, GPT_OSS_WINDOW, GEMMA2_9B, DEEPSEEK_V2_LITE, DEEPSEEK_V3)
        for name, lengths in _CHECKED.items()
    ],
    (
        _spec(DEEPSEEK_V2_LITE, 64, 8192),
        _spec(DEEPSEEK_V2_LITE, 1, 32_768),
        _spec(DEEPSEEK_V3, 64, 4096),
        _spec(DEEPSEEK_V2_LITE, 1, 8192, 512),
        _spec(GPT_OSS, 64, 8192),
        _spec(GPT_OSS_WINDOW, 64, 8192),
        _spec(GEMMA2_9B, 64, 8192),
    ),
)
