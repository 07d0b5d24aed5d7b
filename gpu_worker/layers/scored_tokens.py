"""The tokens of a step that are asked how they attend: how much to each block of their sequence, over heads and layers.

A further pass over the keys, for these tokens alone. Sequences of a group have as many of them each.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from msgspec import Struct

from kernels.layer_cache import LayerCache
from kernels.paged_attention import block_attention

_MAX_KEYS = 1 << 24
"""Numbers of keys that are gathered at once, 64 MiB in float32, or those of one sequence."""


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
            size = max(1, _MAX_KEYS // (num_blocks * cache.keys[0].numel()))
            for part in map(slice, range(0, num_seqs, size), range(size, num_seqs + size, size)):
                group.attention[part] += block_attention(
                    queries[part], cache.keys, tables[part], group.contexts[part], scale, soft_cap, cache.scales, sinks
                )
