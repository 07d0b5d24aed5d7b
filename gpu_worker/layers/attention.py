"""Self-attention over the paged KV cache, with everything about the batch taken from `AttentionContext`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gpu_worker.layers.attention_context import AttentionContext
from kernels.linear import Linear
from kernels.paged_attention import paged_attention
from kernels.rope_kv_write import HeadNormWeights, rope_kv_write


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The sizes of an attention layer; `sliding_window` counts the tokens a query sees, itself included."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    sliding_window: int | None = None


class Attention:
    """Grouped-query attention, optionally with normalised query and key heads."""

    __slots__ = ("_head_norm", "_index", "_output", "_qkv", "_scale", "_shape")

    def __init__(
        self, index: int, shape: AttentionShape, qkv: Linear, output: Linear, head_norm: HeadNormWeights | None = None
    ) -> None:
        """Hold the projections; `qkv` yields the query heads, then the key heads, then the value heads.

        Args:
            index: Layer number, which chooses the layer's KV cache.
            shape: The sizes.
            qkv: Projection to `(num_heads + 2 * num_kv_heads) * head_dim` features.
            output: Projection from `num_heads * head_dim` features back.
            head_norm: Applied to query and key heads before the rotation, in families that have it.
        """
        self._index = index
        self._shape = shape
        self._qkv = qkv
        self._output = output
        self._head_norm = head_norm
        self._scale = shape.head_dim**-0.5

    def __call__(
        self, x: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, context: AttentionContext
    ) -> torch.Tensor:
        """Write the keys and values of `x` into the cache, and attend from `x` to the cache.

        Shapes:
            x, result: `[num_tokens, hidden_size]`
            positions: `[num_tokens]`
            cos_sin: `[max_positions, head_dim]`
        """
        num_tokens, shape = x.shape[0], self._shape
        heads = self._qkv(x).view(num_tokens, -1, shape.head_dim)
        cache = context.caches[self._index]
        query = rope_kv_write(
            heads,
            positions,
            cos_sin,
            cache.keys,
            cache.values,
            context.slot_mapping,
            self._head_norm,
            cache.scales,
        )
        attended = paged_attention(
            query,
            cache.keys,
            cache.values,
            context.block_tables,
            context.query_starts,
            context.context_lens,
            context.max_query_len,
            context.max_context_len,
            self._scale,
            shape.sliding_window,
            kv_scales=cache.scales,
            tree_masks=context.tree_masks,
        )
        return self._output(attended.view(num_tokens, -1))
