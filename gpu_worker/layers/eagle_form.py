"""What both forms of an EAGLE layer, operation by operation and fused, promise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from gpu_worker.layers.attention_context import AttentionContext
from gpu_worker.layers.layer_weights import LayerWeights, Projection

Place = tuple[list[int], list[float]]
"""Tokens that may come next, likely ones first, and their log probabilities given the chain before."""


@dataclass(frozen=True, slots=True)
class EagleWeights:
    """A layer's weights, in the type that it computes in.

    Attributes:
        embedding: `[vocab_size, hidden_size]`.
        join: From an embedding and a hidden vector, side by side, to the residual stream.
        layer: The rest of the layer.
        eps: Of its normalisations.
        cos_sin: `[max_positions, head_dim]` float32, rotations.
    """

    embedding: torch.Tensor
    join: Projection
    layer: LayerWeights
    eps: float
    cos_sin: torch.Tensor


@dataclass(frozen=True, slots=True)
class EagleStep:
    """The entries to compute at once, of all sequences end to end.

    Attributes:
        token_ids: `[num_tokens]` int64, the token behind each hidden vector.
        hidden: `[num_tokens, hidden_size]`, normalised as for the model's head, or what the layer yielded.
        positions: `[num_tokens]` int64, of the hidden vectors.
        context: The batch as attention sees it, over the layer's cache.
    """

    token_ids: torch.Tensor
    hidden: torch.Tensor
    positions: torch.Tensor
    context: AttentionContext


class EagleForm(Protocol):
    """The layer in the form that is fastest on the device. One thread calls it."""

    def __call__(self, step: EagleStep) -> torch.Tensor:
        """Write the entries into the cache; return what they yield, `[num_tokens, hidden_size]`."""
        ...

    def foretell(
        self, step: EagleStep, limits: Sequence[int], num_candidates: int, least_score: float
    ) -> list[list[Place]]:
        """Do the same, and find what follows the first sequences: at each place some candidates, then behind the first.

        Args:
            step: Of the first sequences' entries, and of any others.
            limits: Places to fill behind each of the first sequences, at least 1; block tables cover them.
            num_candidates: Of a place, at most.
            least_score: The log probability that a chain must have to go on.

        Returns:
            The places of each sequence.
        """
        ...
