"""Attention by latent vectors (MLA) over a paged cache that holds one short row for each token.

Keys and values are never made: what makes a key of a latent vector is applied to the query instead, and what makes a
value, to the sum of latent vectors. So the query heads of a token are the heads of one KV head, whose keys are what is
kept and whose values are their first numbers. Prompts are computed in this form too: a token's result does not depend
on how its prompt was cut.
Source: DeepSeek-AI, DeepSeek-V2, arXiv 2405.04434, section 2.1.2 and appendix C.
"""

from __future__ import annotations

import torch

from gpu_worker.layers.attention_context import AttentionContext
from gpu_worker.layers.layer_weights import LatentWeights
from gpu_worker.layers.query_growth import GrowthTable
from kernels.linear import Linear
from kernels.linear.dense import make_head_linear
from kernels.paged_attention import paged_attention
from kernels.rms_norm import rms_norm
from kernels.rope_kv_write import rope_kv_write


class LatentAttention:
    """Multi-head latent attention."""

    __slots__ = (
        "_cos_sin",
        "_eps",
        "_growth",
        "_index",
        "_key_up",
        "_latent",
        "_latent_norm",
        "_output",
        "_query",
        "_query_down",
        "_query_norm",
        "_shape",
        "_value_up",
    )

    def __init__(
        self,
        index: int,
        weights: LatentWeights,
        query_down: Linear | None,
        query: Linear,
        latent: Linear,
        output: Linear,
        cos_sin: torch.Tensor,
    ) -> None:
        """Hold the projections, in the form that is fastest on the device.

        Args:
            index: Layer number, which chooses the layer's cache.
            weights: Those of the projections are not read; what makes keys and values is packed, and can be freed.
            query_down: To the features that `query` reads; None where it reads the stream.
            query: To the query heads.
            latent: To latent vectors and the dimensions that turn.
            output: From the value heads back.
            cos_sin: `[max_positions, rotary_dim]` float32, rotations.
        """
        self._index = index
        self._shape = weights.shape
        self._eps = weights.eps
        self._query_norm = weights.query_norm
        self._latent_norm = weights.latent_norm
        self._key_up = make_head_linear(weights.key_up)
        self._value_up = make_head_linear(weights.value_up)
        self._query_down = query_down
        self._query = query
        self._latent = latent
        self._output = output
        self._cos_sin = cos_sin
        growth = weights.shape.query_growth
        self._growth = None if growth is None else GrowthTable(growth, len(cos_sin), cos_sin.device)

    def __call__(self, x: torch.Tensor, positions: torch.Tensor, context: AttentionContext) -> torch.Tensor:
        """Write the latent vectors of `x` into the cache, and attend from `x` to the cache.

        Shapes:
            x, result: `[num_tokens, hidden_size]`
            positions: `[num_tokens]`
        """
        shape, cache = self._shape, context.caches[self._index]
        query = rope_kv_write(
            self._heads(x),
            positions,
            self._cos_sin,
            cache.keys,
            None,
            context.slot_mapping,
            None,
            cache.scales,
            first_rotated=shape.latent_dim,
            is_interleaved=shape.interleaved,
        )
        attended = paged_attention(
            query if self._growth is None else self._growth.scaled(query, positions),
            cache.keys,
            cache.values,
            context.block_tables,
            context.query_starts,
            context.context_lens,
            context.max_query_len,
            context.max_context_len,
            shape.scale,
            kv_scales=cache.scales,
            tree_masks=context.tree_masks,
        )
        values = self._value_up(attended, attended.new_empty(len(x), shape.num_heads, shape.value_dim))
        return self._output(values.flatten(1))

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        """Return the queries as they meet latent vectors, and behind them the row that is kept of each token.

        Shapes:
            result: `[num_tokens, num_heads + 1, key_dim]`
        """
        shape, num_tokens = self._shape, len(x)
        query_input = x
        if self._query_down is not None:
            assert self._query_norm is not None
            query_input = rms_norm(self._query_down(x), self._query_norm, self._eps)
        query = self._query(query_input).view(num_tokens, shape.num_heads, -1)
        latent = self._latent(x)
        heads = x.new_empty(num_tokens, shape.num_heads + 1, shape.key_dim)
        plain, turning = query[..., : shape.plain_dim], query[..., shape.plain_dim :]
        self._key_up(plain, heads[:, :-1, : shape.latent_dim])
        heads[:, :-1, shape.latent_dim :] = turning
        heads[:, -1, : shape.latent_dim] = rms_norm(latent[:, : shape.latent_dim], self._latent_norm, self._eps)
        heads[:, -1, shape.latent_dim :] = latent[:, shape.latent_dim :]
        return heads
