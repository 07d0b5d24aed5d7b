"""A feed-forward block of two: a gated block that all tokens get, and a mixture of experts beside it."""

from __future__ import annotations

import torch

from gpu_worker.layers.gated_mlp import GatedMLP
from gpu_worker.layers.layer_norm import make_norm
from gpu_worker.layers.layer_weights import DenseAndMixtureWeights
from gpu_worker.layers.mixture import Mixture


class DenseAndMixture:
    """Adds the results of both blocks, which read the same stream by normalisations of their own.

    Source: Gemma 4 26B-A4B; what is computed is what `transformers` computes.
    """

    __slots__ = (
        "_after_dense",
        "_after_mixture",
        "_before_dense",
        "_before_mixture",
        "_before_router",
        "_dense",
        "_mixture",
    )

    def __init__(self, weights: DenseAndMixtureWeights, dense: GatedMLP, mixture: Mixture) -> None:
        """Hold the blocks; of the weights only those of normalisations are read."""
        self._dense = dense
        self._mixture = mixture
        self._before_dense = make_norm(weights.before_dense)
        self._after_dense = make_norm(weights.after_dense)
        self._before_mixture = make_norm(weights.before_mixture)
        self._after_mixture = make_norm(weights.after_mixture)
        self._before_router = make_norm(weights.before_router)

    @property
    def tokens_per_expert(self) -> torch.Tensor:
        """How many tokens each expert got since the block was made: `[num_experts]` int64, on the device."""
        return self._mixture.tokens_per_expert

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Transform the stream `x: [num_tokens, hidden_size]`, which stays as it is."""
        dense = self._after_dense(self._dense(self._before_dense(x)))
        mixed = self._mixture.transform(self._before_mixture(x), self._before_router(x))
        return self._after_mixture(mixed).add_(dense)
