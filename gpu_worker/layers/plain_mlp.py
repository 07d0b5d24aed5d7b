"""The feed-forward block without a gate: `down(activation(up(x)))`."""

from __future__ import annotations

import torch

from kernels.activation import Activation, Xielu, activate
from kernels.linear import Linear


class PlainMLP:
    """Two matrices and a nonlinear function between them.

    Source: Vaswani et al., arXiv 1706.03762, equation 2.
    """

    __slots__ = ("_activation", "_down", "_up")

    def __init__(self, up: Linear, down: Linear, activation: Activation | Xielu) -> None:
        """Hold the projections."""
        self._up = up
        self._down = down
        self._activation = activation

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Transform `x: [num_tokens, hidden_size]`."""
        return self._down(activate(self._up(x), self._activation))
