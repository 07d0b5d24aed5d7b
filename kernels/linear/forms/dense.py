"""Weights as plain numbers."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, eq=False)
class DenseWeight:
    """A matrix of floating point numbers, `[out_features, in_features]`."""

    weight: torch.Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """`(out_features, in_features)`."""
        return (self.weight.shape[0], self.weight.shape[1])

    @property
    def num_bytes(self) -> int:
        """Memory of the weights."""
        return self.weight.nbytes

    def dequantize(self) -> torch.Tensor:
        """Return the matrix in float32."""
        return self.weight.float()

    def to(self, device: torch.device) -> DenseWeight:
        """Return the same weights on a device."""
        return DenseWeight(self.weight.to(device))

    def join(self, lower: object) -> DenseWeight | None:
        """Return both matrices as one, this one above, or None when they are unlike."""
        if not isinstance(lower, DenseWeight) or lower.weight.dtype is not self.weight.dtype:
            return None
        return DenseWeight(torch.cat((self.weight, lower.weight)))
