"""Attention where ranks keep some tokens of each sequence: each attends to its own for the heads of all of them.

What they come to is exchanged with the logs of the sums of exponentials, and each rank merges its own heads.
Source: Dao et al., "Flash-Decoding for long-context inference", 2023.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from gpu_worker.layers.ranks import Ranks
from kernels.paged_attention import Partial, merge_partials, paged_attention

Attend = Callable[..., torch.Tensor]
"""Attention to cached tokens, which is called as `paged_attention` is."""


@dataclass(frozen=True, slots=True)
class ContextAttention:
    """Attention from a rank's heads to all tokens, of which its cache has some."""

    ranks: Ranks

    def __call__(
        self,
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
    ) -> torch.Tensor:
        """Do what `paged_attention` promises; the KV heads are those of all ranks that share the tokens."""
        tokens, (num_tokens, num_heads, _) = self.ranks.tokens, query.shape
        heads = self.ranks.swap(query.expand(tokens.step, *query.shape)).transpose(0, 1).flatten(1, 2)
        lse = torch.empty(heads.shape[:2], dtype=torch.float32, device=query.device)
        values = paged_attention(
            heads,
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
            chunk_size=chunk_size,
            partial=Partial(tokens, lse),
        )
        attended = torch.cat((values, lse[..., None]), 2).view(num_tokens, tokens.step, num_heads, -1)
        parts = self.ranks.swap(attended.transpose(0, 1))
        return merge_partials(parts[..., :-1], parts[..., -1], sinks).to(query.dtype)
