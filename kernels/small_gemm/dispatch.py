"""Chooses the implementation of a small-batch linear layer for the tensors at hand."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kernels.gpu_config import gpu_of, is_triton_installed
from kernels.small_gemm.config import is_preferred
from kernels.small_gemm.workspace import SmallGemmWorkspace


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
    if inputs.is_cuda and is_triton_installed() and inputs.dtype in (torch.bfloat16, torch.float16):
        gpu = gpu_of(inputs.device)
        if is_preferred(gpu.generation, inputs.shape[0], weight.shape[0], weight.shape[1]):
            from kernels.small_gemm.triton_kernel import small_gemm_triton

            return small_gemm_triton(inputs, weight, workspace, gpu)
    return F.linear(inputs, weight)
