"""A feed-forward block of two: a gated block that all tokens get, and a mixture of experts beside it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gpu_worker.layers.attention_context import AttentionContext
from gpu_worker.layers.block_traits import TensorNames
from gpu_worker.layers.layer_source import LayerSource
from gpu_worker.layers.linear import LayerParts, LinearShape
from gpu_worker.layers.mixture import Mixture, MixtureShape, MixtureWeights
from gpu_worker.layers.mlp import GatedMLP, GatedShape, GatedWeights
from gpu_worker.layers.norms import NormWeights, make_norm


@dataclass(frozen=True, slots=True)
class DenseAndMixtureShape:
    """A gated block and a mixture of experts side by side, with normalisations of their own, of the same stream."""

    dense: GatedShape
    mixture: MixtureShape

    def linears(self, names: TensorNames, hidden_size: int) -> dict[str, LinearShape]:
        """Declare the linear layers of both, but for those of experts."""
        return {**self.dense.linears(names, hidden_size), **self.mixture.linears(names, hidden_size)}

    def take(self, source: LayerSource, prefix: str) -> DenseAndMixtureWeights:
        """Take the weights of the layer `prefix`."""
        size = source.hidden_size
        router = source.checkpoint.take_float32(f"{prefix}.router.scale", size) * size**-0.5
        return DenseAndMixtureWeights(
            self.dense.take(source, prefix),
            self.mixture.take(source, prefix),
            before_dense=source.norm(f"{prefix}.pre_feedforward_layernorm"),
            before_mixture=source.norm(f"{prefix}.pre_feedforward_layernorm_2"),
            after_dense=source.norm(f"{prefix}.post_feedforward_layernorm_1"),
            after_mixture=source.norm(f"{prefix}.post_feedforward_layernorm_2"),
            before_router=NormWeights(router, source.eps),
        )


@dataclass(frozen=True, slots=True)
class DenseAndMixtureWeights:
    """A gated block and a mixture, both of the stream as it is."""

    dense: GatedWeights
    mixture: MixtureWeights
    before_dense: NormWeights
    before_mixture: NormWeights
    after_dense: NormWeights
    after_mixture: NormWeights
    before_router: NormWeights

    def block(self, parts: LayerParts) -> DenseAndMixture:
        """Make the block."""
        return DenseAndMixture(self, self.dense.block(parts), self.mixture.block(parts))


class DenseAndMixture:
    """Adds the results of both blocks, which read the same stream by normalisations of their own.

    Source: Gemma 4 26B-A4B; the computation is that of `transformers`.
    """

    def __init__(self, weights: DenseAndMixtureWeights, dense: GatedMLP, mixture: Mixture) -> None:
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

    def __call__(self, x: torch.Tensor, context: AttentionContext) -> torch.Tensor:
        """Transform the stream `x: [num_tokens, hidden_size]`, which stays as it is."""
        dense = self._after_dense(self._dense(self._before_dense(x), context))
        mixed = self._mixture.transform(self._before_mixture(x), self._before_router(x), context)
        return self._after_mixture(mixed).add_(dense)
