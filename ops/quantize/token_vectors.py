"""What layers are given of each token of calibration windows, in models whose layers are given anything.

The vectors follow from the token alone, so those of each different token are made once. The table that they come from
may be larger than the rest of the model: only rows of tokens that occur are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gpu_worker.layers.free_memory import free_host_bytes
from gpu_worker.layers.layer_inputs import TABLE, layer_inputs_over
from gpu_worker.layers.linear import LayerParts
from gpu_worker.layers.rotations import Rotations
from gpu_worker.models.checkpoint import Checkpoint
from gpu_worker.models.config import ModelConfig
from kernels.linear import LinearFactory


@dataclass(frozen=True, slots=True)
class TokenVectors:
    """The vectors of all windows.

    Attributes:
        layers: Of each layer `[num_different_tokens, size]` float32.
        places: `[num_windows, length]` int64, where each token's vectors are.
    """

    layers: Sequence[torch.Tensor]
    places: torch.Tensor

    def of(self, layer: int, window: int) -> torch.Tensor:
        """Return what a layer is given of a window's tokens, `[length, size]`."""
        return self.layers[layer].index_select(0, self.places[window])


def take_token_vectors(
    config: ModelConfig, checkpoint: Checkpoint, windows: torch.Tensor, embedding: torch.Tensor, device: torch.device
) -> TokenVectors | None:
    """Make the vectors on the device of the checkpoint, and keep them where the windows are; None in a model without.

    Shapes:
        windows: `[num_windows, length]` int64, tokens
        embedding: `[vocab_size, hidden_size]` float32, of tokens
    """
    shape = config.block.layer_inputs
    if shape is None:
        return None
    tokens, places = torch.unique(windows, return_inverse=True)
    rows = [checkpoint.take_raw_item(TABLE, token).float() for token in tokens.tolist()]
    source = config.layer_source(checkpoint)
    parts = LayerParts.made_by(LinearFactory(free_host_bytes), Rotations((), 1, device))
    inputs = layer_inputs_over(torch.stack(rows), source, parts, shape, torch.float32)
    embedded = embedding.index_select(0, tokens).to(device) * config.block.embedding_scale
    vectors = inputs(torch.arange(len(tokens), device=device), embedded)
    return TokenVectors([layer.to(windows.device) for layer in vectors], places)
