"""Chooses the implementation of a small-batch linear layer for the tensors at hand, and the memory that it works in."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kernels.gpu_config import gpu_of, is_triton_installed
from kernels.linear.dense.small_gemm.config import MAX_OUT_FEATURES, MAX_ROWS, is_preferred
from kernels.linear.product_launch import MAX_SPLITS, MIN_BLOCK_N

_DTYPES = (torch.bfloat16, torch.float16)


class SmallGemmWorkspace:
    """Device memory in which the programs of one product meet. Made once, used by one stream at a time.

    Partial results of split products, and how many have arrived for each block of the result.

    The kernel leaves the counters as it found them, at zero, so nothing has to be cleared between launches and a
    workspace can be part of a CUDA graph.

    Attributes:
        counters: `[MAX_OUT_FEATURES / MIN_BLOCK_N]` int32.
        partials: `[MAX_SPLITS * max_rows * MAX_OUT_FEATURES]` float32.
    """

    __slots__ = ("counters", "partials")

    def __init__(
        self, device: torch.device, max_rows: int = MAX_ROWS, max_out_features: int = MAX_OUT_FEATURES
    ) -> None:
        """Make room for products of up to `max_rows` rows and `max_out_features` features."""
        self.counters = torch.zeros(-(-max_out_features // MIN_BLOCK_N), dtype=torch.int32, device=device)
        self.partials = torch.empty(MAX_SPLITS * max_rows * max_out_features, dtype=torch.float32, device=device)


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
