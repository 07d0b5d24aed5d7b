"""Small-batch linear layer in plain torch, in float32: the oracle of the kernel."""

from __future__ import annotations

import torch


def small_gemm_reference(inputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Do what `kernels.linear.dense.small_gemm.small_gemm` promises."""
    return (inputs.float() @ weight.float().T).to(inputs.dtype)
