"""The gated feed-forward block: `down(activation(gate(x)) * up(x))`."""

from __future__ import annotations

import torch

from kernels.activation import Activation, gated
from kernels.linear import Linear


class GatedMLP:
    """A gated block whose gate and up projections are one multiplication.

    Source: Shazeer, arXiv 2002.05202, equation 6.
    """

    __slots__ = ("_activation", "_down", "_gate_up")

    def __init__(self, gate_up: Linear, down: Linear, activation: Activation = Activation.SILU) -> None:
        """Hold the projections; `gate_up` yields the gate's features, then the up projection's."""
        self._gate_up = gate_up
        self._down = down
        self._activation = activation

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Transform `x: [num_tokens, hidden_size]`."""
        return self._down(gated(self._gate_up(x), self._activation))
