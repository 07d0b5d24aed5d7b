"""Normalisation of hidden vectors, with the residual addition before it: RMS, or to mean zero and variance one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from kernels.linear.rounding import InputRounding, Rows
from kernels.rms_norm import rms_norm, rms_norm_rounded


@dataclass(frozen=True, slots=True)
class NormWeights:
    """A normalisation of vectors.

    Attributes:
        weight: `[size]`.
        eps: Added to the mean square, or to the variance.
        bias: `[size]`, added last.
        is_centered: The mean is subtracted first (LayerNorm).
    """

    weight: torch.Tensor
    eps: float
    bias: torch.Tensor | None = None
    is_centered: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether it is RMS normalisation, which every kernel computes."""
        return self.bias is None and not self.is_centered


@dataclass(frozen=True, slots=True, eq=False)
class RMSNorm:
    """Scales rows to a root mean square of one, then by a learned weight.

    Source: Zhang and Sennrich, arXiv 1910.07467, equation 4. The mean square is taken in float32.
    """

    weight: torch.Tensor
    eps: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise `x: [num_tokens, size]`."""
        return rms_norm(x, self.weight, self.eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Add `x` to `residual` in place, and return the normalised sum.

        Shapes:
            x, residual, result: `[num_tokens, size]`
        """
        return rms_norm(x, self.weight, self.eps, residual)


@dataclass(frozen=True, slots=True, eq=False)
class LayerNorm:
    """Subtracts the mean, scales to a variance of one, then by a learned weight, and adds a bias where there is one.

    Source: Ba et al., arXiv 1607.06450, equation 4. Computed in float32, rounded once.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    eps: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise `x: [num_tokens, size]`."""
        weight, bias = self.weight, self.bias
        if weight.dtype is x.dtype:
            return functional.layer_norm(x, weight.shape, weight, bias, self.eps)
        # Weights that were stored less one are in float32.
        wide = None if bias is None else bias.float()
        return functional.layer_norm(x.float(), weight.shape, weight.float(), wide, self.eps).to(x.dtype)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Add `x` to `residual` in place, and return the normalised sum."""
        return self(residual.add_(x))


Norm = RMSNorm | LayerNorm
"""A normalisation of rows."""


def normalised(
    norm: Norm | None, x: torch.Tensor, residual: torch.Tensor | None, rounding: InputRounding | None
) -> Rows:
    """Add `x` to a residual in place, if there is one, and normalise the sum, by kernels that round it if they can."""
    if norm is None:
        return x if residual is None else residual.add_(x)
    if rounding is not None and isinstance(norm, RMSNorm):
        return rms_norm_rounded(x, norm.weight, norm.eps, residual, rounding)
    return norm(x) if residual is None else norm.add(x, residual)


def make_norm(weights: NormWeights) -> Norm:
    """Make the normalisation that the weights are of."""
    if weights.is_plain:
        return RMSNorm(weights.weight, weights.eps)
    assert weights.is_centered, "a bias stands beside a subtracted mean only"
    return LayerNorm(weights.weight, weights.bias, weights.eps)
