"""From hidden vectors to scores of the vocabulary: the head at the top of a model."""

from __future__ import annotations

import torch

from gpu_worker.layers.linear import Linear


class LMHead:
    """Scores every token of the vocabulary for each hidden vector."""

    __slots__ = ("_projection",)

    def __init__(self, projection: Linear) -> None:
        """Hold the projection from `hidden_size` to `vocab_size`."""
        self._projection = projection

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return float32 logits `[num_rows, vocab_size]` for `hidden: [num_rows, hidden_size]`."""
        return self._projection.to_float32(hidden)
