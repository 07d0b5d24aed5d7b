"""RMS normalisation in plain torch: the oracle of the kernel, and what runs where there is none."""

from __future__ import annotations

import torch


def rms_norm_reference(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute what `kernels.rms_norm.rms_norm` promises."""
    if residual is not None:
        x = residual.add_(x)
    if weight.dtype is x.dtype:
        return torch.rms_norm(x, weight.shape, weight, eps)
    normalised: torch.Tensor = torch.rms_norm(x.float(), weight.shape, weight.float(), eps)
    return normalised.to(x.dtype)
