"""What both forms of a decoder's layers, one by one and fused, promise."""

from __future__ import annotations

from typing import Protocol

import torch

from gpu_worker.layers.attention_context import AttentionContext


class DecoderForm(Protocol):
    """Embedding, layers and final normalisation, in the form that is fastest on the device."""

    def __call__(self, token_ids: torch.Tensor, positions: torch.Tensor, context: AttentionContext) -> torch.Tensor:
        """Compute a step: write the tokens' keys and values into the cache, return their hidden vectors.

        Shapes:
            token_ids, positions: `[num_tokens]` int64
            result: `[num_tokens, hidden_size]`, normalised; behind it, as further columns, the streams before the
                layers that are tapped
        """
        ...

    def first(self, num_layers: int) -> DecoderForm:
        """Return the decoder without the layers behind the first ones, and without taps; weights are shared."""
        ...
