"""The decoder operation by operation: a stack of attention and gated feed-forward blocks over one residual stream."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence

import torch

from gpu_worker.layers.attention import Attention
from gpu_worker.layers.attention_context import AttentionContext
from gpu_worker.layers.gated_mlp import GatedMLP
from gpu_worker.layers.layer_weights import LayerWeights, Projection
from gpu_worker.layers.rms_norm import RMSNorm
from kernels.linear import Linear, LinearFactory


class DecoderLayer:
    """Attention and feed-forward block of one layer, each with its normalisation before it."""

    __slots__ = ("_attention", "_attention_norm", "_mlp", "_mlp_norm")

    def __init__(self, index: int, weights: LayerWeights, eps: float, linear: Callable[[Projection], Linear]) -> None:
        """Take the layer's weights; `index` chooses its KV cache, `linear` makes the form of its matrices."""
        norm = weights.attention_norm
        self._attention_norm = None if norm is None else RMSNorm(norm, eps)
        qkv, output = linear(weights.qkv), linear(weights.output)
        self._attention = Attention(index, weights.shape, qkv, output, weights.head_norm)
        self._mlp_norm = RMSNorm(weights.mlp_norm, eps)
        self._mlp = GatedMLP(linear(weights.gate_up), linear(weights.down))

    def __call__(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        positions: torch.Tensor,
        cos_sin: torch.Tensor,
        context: AttentionContext,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the layer's last contribution, not added yet, and the residual stream before it.

        Args:
            x: The previous layer's contribution, or the embeddings.
            residual: The stream to add it to, in place; None at the first layer, where `x` becomes the stream.
            positions: Of the step's tokens.
            cos_sin: Rotations of all positions.
            context: The step's batch.

        Shapes:
            x, residual, both results: `[num_tokens, hidden_size]`
        """
        norm = self._attention_norm
        if residual is None:
            residual = x
            x = x if norm is None else norm(x)
        else:
            x = residual.add_(x) if norm is None else norm.add(x, residual)
        return self.add_to(residual, x, positions, cos_sin, context), residual

    def add_to(
        self,
        residual: torch.Tensor,
        x: torch.Tensor,
        positions: torch.Tensor,
        cos_sin: torch.Tensor,
        context: AttentionContext,
    ) -> torch.Tensor:
        """Add what attention makes of `x` to the stream, in place; return the layer's last contribution."""
        x = self._attention(x, positions, cos_sin, context)
        return self._mlp(self._mlp_norm.add(x, residual))


class LayeredDecoder:
    """Holds weights only: every call's state is in its arguments."""

    __slots__ = ("_cos_sin", "_dtype", "_embedding", "_layers", "_norm", "_tapped_layers")

    def __init__(
        self,
        dtype: torch.dtype,
        embedding: torch.Tensor,
        layers: Iterable[LayerWeights],
        final_norm: torch.Tensor,
        cos_sin: torch.Tensor,
        eps: float,
        linears: LinearFactory,
        tapped_layers: Sequence[int] = (),
    ) -> None:
        """Make the layers, which compute in `dtype`; the streams before those that are tapped are returned too.

        Shapes:
            embedding: `[vocab_size, hidden_size]`
            final_norm: `[hidden_size]`
            cos_sin: `[max_positions, head_dim]` float32
        """

        def linear(projection: Projection) -> Linear:
            return linears.make(projection.weight, projection.bias)

        self._dtype = dtype
        self._embedding = embedding
        self._layers = [DecoderLayer(index, weights, eps, linear) for index, weights in enumerate(layers)]
        self._norm = RMSNorm(final_norm, eps)
        self._cos_sin = cos_sin
        self._tapped_layers = tapped_layers

    def __call__(self, token_ids: torch.Tensor, positions: torch.Tensor, context: AttentionContext) -> torch.Tensor:
        """Do what `DecoderForm` promises."""
        x, residual = torch.embedding(self._embedding, token_ids).to(self._dtype), None
        streams: dict[int, torch.Tensor] = {}
        for index, layer in enumerate(self._layers):
            if index in self._tapped_layers:
                streams[index] = x.clone() if residual is None else x + residual
            x, residual = layer(x, residual, positions, self._cos_sin, context)
        result = self._norm(x) if residual is None else self._norm.add(x, residual)
        return torch.cat((result, *(streams[index] for index in self._tapped_layers)), 1) if streams else result

    def first(self, num_layers: int) -> LayeredDecoder:
        """Do what `DecoderForm` promises."""
        short = copy.copy(self)
        short._layers = self._layers[:num_layers]
        short._tapped_layers = ()
        return short
