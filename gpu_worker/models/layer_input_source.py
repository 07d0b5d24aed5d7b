"""Takes what layers are given of each token, and how they add it to the stream, from a checkpoint."""

from __future__ import annotations

import torch

from gpu_worker.layers.embedding import Embedding
from gpu_worker.layers.layer_inputs import LayerInputs
from gpu_worker.layers.layer_norm import make_norm
from gpu_worker.layers.layer_parts import LayerParts
from gpu_worker.models.layer_source import LayerSource


def take_layer_inputs(source: LayerSource, parts: LayerParts, dtype: torch.dtype) -> LayerInputs | None:
    """Take what makes the vectors of all layers, in type `dtype`; None in a model without such."""
    config = source.config
    shape = config.block.layer_inputs
    if shape is None:
        return None
    size = config.num_layers * shape.size
    table = source.checkpoint.take("model.embed_tokens_per_layer.weight", shape.vocab_size, size)
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
