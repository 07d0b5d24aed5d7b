"""What the calibration tokens look like at the inputs of a layer's matrices: sums, never the inputs themselves."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.linear import Linear


class InputMoments:
    """Sums over all tokens that one input has seen.

    Attributes:
        gram: `inputs.T @ inputs`, `[in_features, in_features]` float32.
        magnitudes: Sum of absolute values, `[in_features]` float32.
        num_tokens: How many.
    """

    __slots__ = ("gram", "magnitudes", "num_tokens")

    def __init__(self, gram: torch.Tensor, magnitudes: torch.Tensor, num_tokens: int = 0) -> None:
        """Begin with these sums."""
        self.gram = gram
        self.magnitudes = magnitudes
        self.num_tokens = num_tokens

    @classmethod
    def none(cls, in_features: int, device: torch.device) -> InputMoments:
        """Begin with no tokens."""
        return cls(torch.zeros(in_features, in_features, device=device), torch.zeros(in_features, device=device))

    def add(self, inputs: torch.Tensor) -> None:
        """Add tokens, `[num_tokens, in_features]`."""
        inputs = inputs.float()
        self.gram.addmm_(inputs.T, inputs)
        self.magnitudes += inputs.abs().sum(0)
        self.num_tokens += len(inputs)

    def scaled(self, factors: torch.Tensor) -> InputMoments:
        """Return the sums of the inputs times `factors`, `[in_features]`, all positive."""
        gram = self.gram * factors * factors[:, None]
        return InputMoments(gram, self.magnitudes * factors, self.num_tokens)


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """The inputs of a layer's four matrices, under the names that `LayerWeights` has for these."""

    qkv: InputMoments
    output: InputMoments
    gate_up: InputMoments
    down: InputMoments


class RecordingLinear:
    """A linear layer that adds its inputs to the sums."""

    __slots__ = ("_linear", "_moments")

    def __init__(self, linear: Linear, moments: InputMoments) -> None:
        """Record what `linear` is given."""
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
