"""What families ask of attention beyond the plain form, and what it is by its definition, in double precision."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from kernels.paged_attention.reference import paged_attention_reference
from tests.kernels.paged_batch import PagedBatch, PagedSequence, Shape, make_batch, make_sequence


@dataclass(frozen=True)
class Options:
    """Options of attention; sinks are made for all heads."""

    sliding_window: int | None = None
    soft_cap: float | None = None
    has_sinks: bool = False
    chunk_size: int | None = None

    def sinks(self, num_heads: int) -> torch.Tensor | None:
        if not self.has_sinks:
            return None
        return torch.randn(num_heads, generator=torch.Generator().manual_seed(num_heads)) * 2 + 1

    def asked(self, num_heads: int) -> dict[str, Any]:
        """Return the fields of `AttentionOptions`."""
        limits = {"sliding_window": self.sliding_window, "soft_cap": self.soft_cap}
        return {**limits, "sinks": self.sinks(num_heads), "chunk_size": self.chunk_size}


OPTIONS = {
    "plain": Options(), "window": Options(sliding_window=20), "cap": Options(soft_cap=2.0),
    "sinks": Options(has_sinks=True), "chunk": Options(chunk_size=16), "odd chunk": Options(chunk_size=27),
    "gpt-oss": Options(sliding_window=20, has_sinks=True),
    "Gemma 2": Options(sliding_window=40, soft_cap=2.0),
    "all": Options(sliding_window=24, soft_cap=2.0, has_sinks=True, chunk_size=32),
}  # fmt: skip
# Lengths and query tokens of sequences: decodes, drafts, chunks; a chunk of a prompt behind a long context.
QUERIES = {"decodes": ([1, 130, 17], [1, 1, 1]), "mixed": ([70, 27, 1, 210], [3, 27, 1, 33])}


def attend_by_definition(sequence: PagedSequence, position: int, scale: float, options: Options) -> torch.Tensor:
    """Attend from one token to those up to itself, `[num_heads, value_dim]` in float64."""
    first = 0
    if options.sliding_window is not None:
        first = max(first, position - options.sliding_window + 1)
    if options.chunk_size is not None:
        first = max(first, position // options.chunk_size * options.chunk_size)
    group = sequence.query.shape[1] // sequence.key.shape[1]
    keys, values = (
        part[first : position + 1].double().repeat_interleave(group, 1) for part in (sequence.key, sequence.value)
    )
    scores = torch.einsum("hd,khd->hk", sequence.query[position].double(), keys) * scale
    if options.soft_cap is not None:
        scores = options.soft_cap * torch.tanh(scores / options.soft_cap)
    sinks = options.sinks(len(scores))
    total = scores.exp().sum(1) + (0 if sinks is None else sinks.double().exp())
    return torch.einsum("hk,khd->hd", scores.exp() / total[:, None], values)


def run_reference(batch: PagedBatch, options: Options) -> torch.Tensor:
    """Run the reference with these options."""
    return paged_attention_reference(*batch.arguments(**options.asked(batch.query.shape[1])))


def batch_of(shape: Shape, queries: str) -> PagedBatch:
    """Lay the sequences of these names into a batch."""
    lengths, query_lens = QUERIES[queries]
    return make_batch([make_sequence(length, shape, seed=length) for length in lengths], query_lens, shape)


def mostly_slow(forms: dict[str, Shape], fast: set[tuple[str, str, str]]) -> list[Any]:
    """Every form with every variant; only some are tested by default, as the interpreter takes long."""
    return [
        pytest.param(shape, options, queries, id=f"{form}-{name}-{queries}", marks=marks)
        for form, shape in forms.items()
        for name, options in OPTIONS.items()
        for queries in ("decodes", "mixed")
        for marks in [[] if (form, name, queries) in fast else pytest.mark.slow]
    ]
