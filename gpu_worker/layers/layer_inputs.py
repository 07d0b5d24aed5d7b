"""Per-layer inputs: a small vector of each token for each layer, beside the stream.

A vector is made of two: a row of a table by the token, and a projection of the token's embedding. Each layer multiplies
its vector by a gate that the stream yields, and adds a projection of the product.

Source: Gemma 3n's and 4's per-layer embeddings; the computation is that of `transformers`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gpu_worker.layers.attention_context import AttentionContext
from gpu_worker.layers.block_traits import LayerInputShape
from gpu_worker.layers.layer_source import LayerSource
from gpu_worker.layers.linear import LayerParts, Linear, LinearShape, Partition, Projection
from gpu_worker.layers.media_inputs import MediaInputs
from gpu_worker.layers.norms import Norm, NormWeights, make_norm
from gpu_worker.layers.vocabulary import Embedding
from kernels.activation import Activation, activate
from kernels.linear import Linear as Product
from kernels.low_rank import AdapterRows, AdapterTable

TABLE = "model.embed_tokens_per_layer.weight"
"""From a token to the first part of its vectors of all layers."""
_PROJECTION = "model.per_layer_model_projection"


@dataclass(frozen=True, slots=True, eq=False)
class LayerInputs:
    """Makes the vectors of a step's tokens for all layers. `image_token` stands for the tokens of images."""

    table: Embedding
    projection: Product
    norm: Norm
    size: int
    scale: float
    image_token: int
    adapters: AdapterTable | None = None

    def __call__(
        self,
        token_ids: torch.Tensor,
        embeddings: torch.Tensor,
        media: MediaInputs | None = None,
        adapters: AdapterRows | None = None,
    ) -> Sequence[torch.Tensor]:
        """Return for each layer `[num_tokens, size]`, views of one tensor."""
        if media is not None:
            token_ids = token_ids.index_fill(0, media.places, self.image_token)
        product = self.projection(embeddings)
        if adapters is not None and self.adapters is not None:
            self.adapters.add(embeddings, product, adapters)
        projected = self.norm((product * self.scale).view(-1, self.size))
        vectors = self.table(token_ids).view(-1, self.size).add_(projected).mul_(2**-0.5)
        return vectors.view(len(token_ids), -1, self.size).unbind(1)


def take_layer_inputs(
    source: LayerSource, num_layers: int, parts: LayerParts, dtype: torch.dtype
) -> LayerInputs | None:
    """Take what makes the vectors of all layers, in type `dtype`; None in a model without such."""
    shape = source.block.layer_inputs
    if shape is None:
        return None
    table = source.checkpoint.take(TABLE, shape.vocab_size, num_layers * shape.size)
    return layer_inputs_over(table, source, parts, shape, dtype)


def layer_inputs_over(
    table: torch.Tensor, source: LayerSource, parts: LayerParts, shape: LayerInputShape, dtype: torch.dtype
) -> LayerInputs:
    """Take what makes the vectors but for the table, which may have rows of some tokens only.

    Shapes:
        table: `[num_tokens, num_layers * size]`
    """
    size = table.shape[1]
    # The checkpoint was trained with the nearest number of its type.
    scale = torch.tensor(shape.size**0.5, dtype=dtype).item()
    projection = source.projections.take([_PROJECTION], [size], source.hidden_size)
    norm, targets = source.norm("model.per_layer_projection_norm", shape.size), parts.adapters
    return LayerInputs(
        Embedding(table, dtype, scale),
        parts.product(projection),
        make_norm(norm),
        shape.size,
        source.hidden_size**-0.5,
        shape.image_token,
        None if targets is None else targets.add((_PROJECTION,), (size,), source.hidden_size)[0],
    )


@dataclass(frozen=True, slots=True)
class LayerInputWeights:
    """How a layer adds its input of each token to the stream.

    Attributes:
        gate: `[size, hidden_size]`, from the stream to what the input is multiplied by.
        projection: `[hidden_size, size]`, of the product.
    """

    gate: Projection
    projection: Projection
    norm: NormWeights
    activation: Activation

    @classmethod
    def take(cls, source: LayerSource, prefix: str, shape: LayerInputShape) -> LayerInputWeights:
        """Take the weights of the layer `prefix`."""
        size, whole = source.hidden_size, Partition.REPLICATED
        return cls(
            source.linear(prefix, LinearShape(("per_layer_input_gate",), (shape.size,), size, whole)),
            source.linear(prefix, LinearShape(("per_layer_projection",), (size,), shape.size, whole)),
            source.norm(f"{prefix}.post_per_layer_input_norm"),
            shape.activation,
        )

    def block(self, parts: LayerParts) -> LayerInputBlock:
        """Make the block."""
        gate, projection = parts.linear(self.gate), parts.linear(self.projection)
        return LayerInputBlock(gate, projection, make_norm(self.norm), self.activation)


@dataclass(frozen=True, slots=True, eq=False)
class LayerInputBlock:
    """Adds a layer's vectors to the stream."""

    gate: Linear
    projection: Linear
    norm: Norm
    activation: Activation

    def __call__(self, stream: torch.Tensor, vectors: torch.Tensor, context: AttentionContext) -> torch.Tensor:
        """Return the result to add to the stream."""
        gates = activate(self.gate(stream, context), self.activation)
        return self.norm(self.projection(gates * vectors, context))
