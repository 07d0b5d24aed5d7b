"""Self-attention in both directions: it keeps nothing, since all tokens of its sequences are in the step."""

from __future__ import annotations

import torch

from gpu_worker.layers.attention_context import AttentionContext
from gpu_worker.layers.layer_traits import AttentionShape, HeadNorm
from gpu_worker.layers.layer_weights import AttentionWeights
from gpu_worker.layers.whole_attention import WholeAttention, sequences_of
from kernels.linear import Linear
from kernels.rope_kv_write import HeadNormWeights, rope_kv_write

_HEAD_NORMS = (HeadNorm.NONE, HeadNorm.HEADS)


class BidirectionalAttention:
    """Grouped-query attention of tokens to all of their sequence, or to those that are near."""

    __slots__ = ("_cos_sin", "_head_norms", "_output", "_qkv", "_shape")

    def __init__(self, weights: AttentionWeights, qkv: Linear, output: Linear, cos_sin: torch.Tensor) -> None:
        """Hold the projections, as `Attention` does.

        Args:
            weights: Those of the projections are not read.
            qkv: Projection to the query heads, then the key heads, then the value heads.
            output: Projection from the attended values back.
            cos_sin: `[max_positions, head_dim]` float32, rotations.
        """
        _check(weights.shape)
        self._shape = weights.shape
        self._qkv = qkv
        self._output = output
        self._cos_sin = cos_sin
        self._head_norms: tuple[HeadNormWeights, ...] = ()
        if (norm := weights.head_norm) is not None:
            self._head_norms = tuple(HeadNormWeights(weight, weight, norm.eps) for weight in (norm.query, norm.key))

    def __call__(self, x: torch.Tensor, positions: torch.Tensor, context: AttentionContext) -> torch.Tensor:
        """Attend within the sequences of `x`.

        Shapes:
            x, result: `[num_tokens, hidden_size]`
            positions: `[num_tokens]`
        """
        shape, num_tokens = self._shape, len(x)
        heads = self._qkv(x).view(num_tokens, -1, shape.head_dim)
        turned, value = heads[:, : -shape.num_kv_heads], heads[:, -shape.num_kv_heads :]
        query, key = turned.tensor_split([shape.num_heads], dim=1)
        if self._head_norms:
            for part, norm in zip((query, key), self._head_norms, strict=True):
                self._turn(part, positions, context, norm)
        else:
            # Keys turn as queries do: to the kernel all are queries of a layer that keeps nothing.
            self._turn(turned, positions, context, None)
        attention = WholeAttention(context.query_starts, sequences_of(context.query_starts, num_tokens))
        attended = attention(
            *(part.transpose(0, 1) for part in (query, key, value)), scale=shape.scale, window=shape.sliding_window
        )
        return self._output(attended.transpose(0, 1).reshape(num_tokens, -1))

    def _turn(
        self, heads: torch.Tensor, positions: torch.Tensor, context: AttentionContext, norm: HeadNormWeights | None
    ) -> None:
        """Normalise heads, if they are, and rotate them, in place."""
        rope_kv_write(heads, positions, self._cos_sin, None, None, context.slot_mapping, norm)


def _check(shape: AttentionShape) -> None:
    plain = AttentionShape(
        shape.num_heads,
        shape.num_kv_heads,
        shape.head_dim,
        sliding_window=shape.sliding_window,
        scale=shape.scale,
        rotary=shape.rotary,
        rotary_dim=shape.rotary_dim,
        interleaved=shape.interleaved,
        head_norm=shape.head_norm,
        qkv_bias=shape.qkv_bias,
        output_bias=shape.output_bias,
        output_scale=shape.output_scale,
        sees_later=True,
    )
    assert shape == plain, "attention in both directions has no such option"
    assert shape.head_norm in _HEAD_NORMS
