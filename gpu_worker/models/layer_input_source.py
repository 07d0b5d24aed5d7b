"""Takes what layers are given of each token, and how they add it to the stream, from a checkpoint."""

from __future__ import annotations

import torch

from gpu_worker.layers.embedding import Embedding
from gpu_worker.layers.layer_inputs import LayerInputs
from gpu_worker.layers.layer_norm import make_norm
from gpu_worker.layers.layer_parts import LayerParts
from gpu_worker.layers.layer_traits import LayerInputShape
from gpu_worker.models.layer_source import LayerSource

TABLE = "model.embed_tokens_per_layer.weight"
"""From a token to the first part of its vectors of all layers."""


def take_layer_inputs(source: LayerSource, parts: LayerParts, dtype: torch.dtype) -> LayerInputs | None:
    """Take what makes the vectors of all layers, in type `dtype`; None in a model without such."""
    shape = source.config.block.layer_inputs
    if shape is None:
        return None
    table = source.checkpoint.take(TABLE, shape.vocab_size, source.config.num_layers * shape.size)
    return layer_inputs_over(table, source, parts, shape, dtype)


def layer_inputs_over(
    table: torch.Tensor, source: LayerSource, parts: LayerParts, shape: LayerInputShape, dtype: torch.dtype
) -> LayerInputs:
    """Take what makes the vectors but for the table, which may have rows of some tokens only.

    Shapes:
        table: `[num_tokens, num_layers * size]`
    """
    config, size = source.config, source.config.num_layers * shape.size
    # The checkpoint was trained with the nearest number of its type.
    scale = torch.tensor(shape.size**0.5, dtype=dtype).item()
    projection = source.projections.take(["model.per_layer_model_projection"], [size], config.hidden_size)
    norm = source.norm("model.per_layer_projection_norm", shape.size)
    return LayerInputs(
        Embedding(table, dtype, scale),
        parts.linear(projection),
        make_norm(norm),
        shape.size,
        config.hidden_size**-0.5,
    )
