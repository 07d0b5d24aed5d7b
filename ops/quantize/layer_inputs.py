"""What the calibration tokens look like at the inputs of a layer's matrices: sums, never the inputs themselves."""

from __future__ import annotations

import torch

from kernels.linear import Linear


class InputMoments:
    """Sums over all tokens that one input has seen.

    Attributes:
        gram: `inputs.T @ inputs`, `[in_features, in_features]` float32.
        num_tokens: How many.
    """

    __slots__ = ("gram", "num_tokens")

    def __init__(self, gram: torch.Tensor, num_tokens: int = 0) -> None:
        self.gram = gram
        self.num_tokens = num_tokens

    @classmethod
    def none(cls, in_features: int, device: torch.device) -> InputMoments:
        """Begin with no tokens."""
        return cls(torch.zeros(in_features, in_features, device=device))

    def add(self, inputs: torch.Tensor) -> None:
        """Add tokens, `[num_tokens, in_features]`."""
        inputs = inputs.float()
        self.gram.addmm_(inputs.T, inputs)
        self.num_tokens += len(inputs)


class RecordingLinear:
    """A linear layer that adds its inputs to the sums."""

    __slots__ = ("_linear", "_moments")

    def __init__(self, linear: Linear, moments: InputMoments) -> None:
        self._linear = linear
        self._moments = moments

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Record and multiply."""
        self._moments.add(x)
        return self._linear(x)

    def to_float32(self, x: torch.Tensor) -> torch.Tensor:
        """Record and multiply."""
        self._moments.add(x)
        return self._linear.to_float32(x)
