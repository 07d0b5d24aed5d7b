"""Root-mean-square normalisation: of hidden vectors, with the residual addition before it, and of attention heads."""

from __future__ import annotations

import torch


class RMSNorm:
    """Scales rows to a root mean square of one, then by a learned weight.

    Source: Zhang and Sennrich, arXiv 1910.07467, equation 4. The mean square is taken in float32.
    """

    __slots__ = ("_eps", "_shape", "_weight")

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        """Hold the weight, `[size]`."""
        self._weight = weight
        self._shape = weight.shape
        self._eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise `x: [..., size]`."""
        return torch.rms_norm(x, self._shape, self._weight, self._eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Add `x` to `residual` in place, and return the normalised sum.

        Shapes:
            x, residual, result: `[num_tokens, size]`
        """
        return torch.rms_norm(residual.add_(x), self._shape, self._weight, self._eps)


class HeadNorm:
    """Normalises query and key heads at once (qk-norm): every head over its own dimensions, by its own weight."""

    __slots__ = ("_eps", "_shape", "_weights")

    def __init__(self, weights: torch.Tensor, eps: float) -> None:
        """Hold one weight per head, `[num_heads, head_dim]`."""
        self._weights = weights
        self._shape = weights.shape[-1:]
        self._eps = eps

    def __call__(self, heads: torch.Tensor) -> torch.Tensor:
        """Normalise `heads: [num_tokens, num_heads, head_dim]`."""
        return torch.rms_norm(heads, self._shape, None, self._eps).mul_(self._weights)
