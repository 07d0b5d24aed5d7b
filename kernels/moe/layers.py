"""What the experts of a layer promise, and those that are made of linear layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from kernels.activation.experts import ExpertActivation
from kernels.linear import Linear


class Experts(Protocol):
    """The experts of a layer that are on this device."""

    @property
    def tokens_per_expert(self) -> torch.Tensor:
        """How many tokens each expert here got since it was made: `[num_experts]` int64, on the device."""

    def __call__(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return the sum over a token's experts of weight times `down(activation(gate_up(x)))`, in the type of `x`.

        Experts that are not here contribute nothing and are not counted: those of other ranks, and ids below zero.

        Shapes:
            x, result: `[num_tokens, hidden_size]`
            ids: `[num_tokens, top_k]` int32; those of a token differ.
            weights: `[num_tokens, top_k]` float32
        """


@dataclass(frozen=True, slots=True)
class ExpertLayers:
    """The two projections of an expert."""

    gate_up: Linear
    down: Linear


class LinearExperts:
    """Experts one after another, by linear layers: on CPUs, where there is no kernel for all at once.

    It asks the device which experts have tokens, so steps with it cannot be captured.
    """

    def __init__(
        self, layers: Sequence[ExpertLayers], activation: ExpertActivation, first_expert: int, device: torch.device
    ) -> None:
        self._layers = tuple(layers)
        self._activation = activation
        self._first_expert = first_expert
        self.tokens_per_expert = torch.zeros(len(layers), dtype=torch.int64, device=device)

    def __call__(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Multiply the tokens of each expert that has any."""
        result = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        local = ids.long() - self._first_expert
        is_here = (local >= 0) & (local < len(self._layers))
        counts = torch.bincount(local[is_here], minlength=len(self._layers))
        self.tokens_per_expert += counts
        for expert in counts.nonzero()[:, 0].tolist():
            tokens, places = torch.where(local == expert)
            layers = self._layers[expert]
            hidden = self._activation(layers.gate_up.to_float32(x[tokens])).to(x.dtype)
            result.index_add_(0, tokens, layers.down.to_float32(hidden) * weights[tokens, places, None])
        return result.to(x.dtype)
