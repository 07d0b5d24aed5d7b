"""The tokens of a step that are asked how they attend: how much to each block of their sequence, over heads and layers.

A further pass over the keys, for these tokens alone. Sequences of a group have as many of them each.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from msgspec import Struct

from kernels.layer_cache import LayerCache
from kernels.paged_attention import block_attention


class ScoredGroup(Struct, frozen=True):
    """Sequences that have as many of the tokens each.

    Attributes:
        first: How many tokens are in the groups before.
        sequences: `[num_seqs]` int64, places in the step.
        contexts: `[num_seqs, num_queries]` int64, tokens that each token sees, itself included.
        attention: `[num_seqs, num_queries, num_blocks]` float32; adds up over layers, of each layer the head with most.
    """

    first: int
    sequences: torch.Tensor
    contexts: torch.Tensor
    attention: torch.Tensor


class ScoredTokens(Struct, frozen=True):
    """All of them.

    Attributes:
        tokens: `[num_scored]` int64, places in the step, group by group.
    """

    tokens: torch.Tensor
    groups: Sequence[ScoredGroup]

    def add(
        self,
        query: torch.Tensor,
        cache: LayerCache,
        block_tables: torch.Tensor,
        scale: float,
        soft_cap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        """Add what the tokens' rotated queries of a layer, `[num_scored, num_heads, head_dim]`, attend to."""
        for group in self.groups:
            num_seqs, num_queries, num_blocks = group.attention.shape
            own = query[group.first : group.first + num_seqs * num_queries]
            queries = own.view(num_seqs, num_queries, *query.shape[1:])
            tables = block_tables[group.sequences, :num_blocks].long()
            group.attention.add_(
                block_attention(queries, cache.keys, tables, group.contexts, scale, soft_cap, cache.scales, sinks)
            )
