"""Root-mean-square normalisation of hidden vectors, with the residual addition before it."""

from __future__ import annotations

import torch

from kernels.rms_norm import rms_norm


class RMSNorm:
    """Scales rows to a root mean square of one, then by a learned weight.

    Source: Zhang and Sennrich, arXiv 1910.07467, equation 4. The mean square is taken in float32.
    """

    __slots__ = ("_eps", "_weight")

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        """Hold the weight, `[size]`."""
        self._weight = weight
        self._eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise `x: [num_tokens, size]`."""
        return rms_norm(x, self._weight, self._eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Add `x` to `residual` in place, and return the normalised sum.

        Shapes:
            x, residual, result: `[num_tokens, size]`
        """
        return rms_norm(x, self._weight, self._eps, residual)
