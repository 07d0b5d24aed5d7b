"""Per-layer inputs: a small vector of each token for each layer, beside the stream.

A vector is made of two: a row of a table by the token, and a projection of the token's embedding. Each layer multiplies
its vector by a gate that the stream yields, and adds what a projection makes of it.

Source: Gemma 3n's and 4's per-layer embeddings; what is computed is what `transformers` computes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gpu_worker.layers.embedding import Embedding
from gpu_worker.layers.layer_norm import Norm
from kernels.activation import Activation, activate
from kernels.linear import Linear


class LayerInputs:
    """Makes the vectors of a step's tokens for all layers."""

    __slots__ = ("_norm", "_projection", "_scale", "_size", "_table")

    def __init__(self, table: Embedding, projection: Linear, norm: Norm, size: int, scale: float) -> None:
        """Hold the parts.

        Args:
            table: From a token to its vectors of all layers, `num_layers * size` numbers.
            projection: From a token's embedding to as many.
            norm: Of each projected vector.
            size: Of a vector.
            scale: What the projection's result is multiplied by.
        """
        self._table = table
        self._projection = projection
        self._norm = norm
        self._size = size
        self._scale = scale

    def __call__(self, token_ids: torch.Tensor, embeddings: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return for each layer `[num_tokens, size]`, views of one tensor.

        Shapes:
            token_ids: `[num_tokens]` int64
            embeddings: `[num_tokens, hidden_size]`, scaled as the stream is
        """
        projected = self._norm((self._projection(embeddings) * self._scale).view(-1, self._size))
        vectors = self._table(token_ids).view(-1, self._size).add_(projected).mul_(2**-0.5)
        return vectors.view(len(token_ids), -1, self._size).unbind(1)


class LayerInputBlock:
    """Adds a layer's vectors to the stream."""

    __slots__ = ("_activation", "_gate", "_norm", "_projection")

    def __init__(self, gate: Linear, projection: Linear, norm: Norm, activation: Activation) -> None:
        """Hold what `LayerInputWeights` describes."""
        self._gate = gate
        self._projection = projection
        self._norm = norm
        self._activation = activation

    def __call__(self, stream: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
        """Return what is to be added to the stream.

        Shapes:
            stream, result: `[num_tokens, hidden_size]`
            vectors: `[num_tokens, size]`
        """
        return self._norm(self._projection(activate(self._gate(stream), self._activation) * vectors))
