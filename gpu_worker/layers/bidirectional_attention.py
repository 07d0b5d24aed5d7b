"""Self-attention in both directions: it keeps nothing, since all tokens of its sequences are in the step."""

from __future__ import annotations

import torch

from gpu_worker.layers.attention_context import AttentionContext
from gpu_worker.layers.linear import Linear
from gpu_worker.layers.whole_attention import WholeAttention, sequences_of
from kernels.rope_kv_write import HeadNormWeights, rope_kv_write


class BidirectionalAttention:
    """Grouped-query attention of tokens to all of their sequence, or to those that are near."""

    def __init__(
        self,
        sizes: tuple[int, int, int],
        scale: float | None,
        window: int | None,
        norm: HeadNormWeights | None,
        qkv: Linear,
        output: Linear,
        cos_sin: torch.Tensor,
    ) -> None:
        self._sizes = sizes
        self._scale = scale
        self._window = window
        self._qkv = qkv
        self._output = output
        self._cos_sin = cos_sin
        self._head_norms: tuple[HeadNormWeights, ...] = ()
        if norm is not None:
            self._head_norms = tuple(HeadNormWeights(weight, weight, norm.eps) for weight in (norm.query, norm.key))

    def __call__(self, x: torch.Tensor, positions: torch.Tensor, context: AttentionContext) -> torch.Tensor:
        """Attend within the sequences of `x`."""
        num_tokens, (num_heads, num_kv_heads, head_dim) = len(x), self._sizes
        heads = self._qkv(x, context).view(num_tokens, -1, head_dim)
        turned, value = heads[:, :-num_kv_heads], heads[:, -num_kv_heads:]
        query, key = turned.tensor_split([num_heads], dim=1)
        if self._head_norms:
            for part, norm in zip((query, key), self._head_norms, strict=True):
                self._turn(part, positions, context, norm)
        else:
            # Keys turn as queries do: to the kernel all are queries of a layer that keeps nothing.
            self._turn(turned, positions, context, None)
        attention = WholeAttention(context.query_starts, sequences_of(context.query_starts, num_tokens))
        attended = attention(
            *(part.transpose(0, 1) for part in (query, key, value)), scale=self._scale, window=self._window
        )
        return self._output(attended.transpose(0, 1).reshape(num_tokens, -1), context)

    def _turn(
        self, heads: torch.Tensor, positions: torch.Tensor, context: AttentionContext, norm: HeadNormWeights | None
    ) -> None:
        rope_kv_write(heads, positions, self._cos_sin, None, None, context.slot_mapping, norm)
