"""RMS normalisation by the compiled CPU kernel (`cpu.cpp`)."""

from __future__ import annotations

import torch

from kernels.cpu_library import DTYPE_NUMBERS, CpuLibrary
from kernels.cpu_structures import address_of


def can_run(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Return True where the kernel supports these types and layouts."""
    return x.is_cpu and x.dtype in DTYPE_NUMBERS and weight.dtype is x.dtype and x.dim() == 2 and x.stride(1) == 1


def rms_norm_cpu(
    library: CpuLibrary, x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """Do what `kernels.rms_norm.rms_norm` promises; the residual, when there is one, has the type of `x`."""
    num_rows, size = x.shape
    result = torch.empty(num_rows, size, dtype=x.dtype)
    library.rms_norm(
        x.data_ptr(),
        weight.data_ptr(),
        address_of(residual),
        result.data_ptr(),
        x.stride(0),
        eps,
        num_rows,
        size,
        DTYPE_NUMBERS[x.dtype],
        torch.get_num_threads(),
    )
    return result
