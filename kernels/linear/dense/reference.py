"""Linear layers in plain torch: the oracle of the kernel."""

from __future__ import annotations

import torch


def linear_reference(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, to_float32: bool = False
) -> torch.Tensor:
    """Compute what `kernels.linear.dense.linear` promises, in fp32, rounded once."""
    result = x.float() @ weight.float().T
    if bias is not None:
        result += bias.float()
    return result if to_float32 else result.to(x.dtype)
