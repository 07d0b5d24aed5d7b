"""Chooses the implementation of a small-batch linear layer for the tensors at hand."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kernels.gpu_config import gpu_of, is_triton_installed
from kernels.linear.dense.small_gemm.config import SmallGemmWorkspace, is_preferred

_DTYPES = (torch.bfloat16, torch.float16)


def can_be_preferred(weight: torch.Tensor) -> bool:
    """Return True for matrices whose products with one row, at least, the kernel does faster than cuBLAS."""
    if not weight.is_cuda or not is_triton_installed() or weight.dtype not in _DTYPES:
        return False
    return is_preferred(gpu_of(weight.device).generation, 1, weight.shape[0], weight.shape[1])


def small_gemm(inputs: torch.Tensor, weight: torch.Tensor, workspace: SmallGemmWorkspace) -> torch.Tensor:
    """Return `inputs @ weight.T`, summed in float32.

    A row's result depends on how many rows come with it only where the tables switch implementations.

    Args:
        inputs: Contiguous in its last dimension.
        weight: Likewise, of the same dtype.
        workspace: On the same device; not in use by another stream.

    Shapes:
        inputs: `[num_rows, in_features]`
        weight: `[out_features, in_features]`
        result: `[num_rows, out_features]`
    """
    if inputs.is_cuda and is_triton_installed() and inputs.dtype in _DTYPES:
        gpu = gpu_of(inputs.device)
        if is_preferred(gpu.generation, inputs.shape[0], weight.shape[0], weight.shape[1]):
            from kernels.linear.dense.small_gemm.triton_kernel import small_gemm_triton

            return small_gemm_triton(inputs, weight, workspace, gpu)
    return F.linear(inputs, weight)
