"""Between token ids and hidden vectors: the embedding at the bottom of a model, the head at its top."""

from __future__ import annotations

import torch

from gpu_worker.layers.linear import Linear


class Embedding:
    """Looks up one vector per token."""

    __slots__ = ("_weight",)

    def __init__(self, weight: torch.Tensor) -> None:
        """Hold the vectors, `[vocab_size, hidden_size]`."""
        self._weight = weight

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return a new `[num_tokens, hidden_size]` for `token_ids: [num_tokens]`."""
        return torch.embedding(self._weight, token_ids)


class LMHead:
    """Scores every token of the vocabulary for each hidden vector."""

    __slots__ = ("_projection",)

    def __init__(self, projection: Linear) -> None:
        """Hold the projection from `hidden_size` to `vocab_size`."""
        self._projection = projection

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return float32 logits `[num_rows, vocab_size]` for `hidden: [num_rows, hidden_size]`."""
        return self._projection(hidden).float()
