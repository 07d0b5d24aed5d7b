"""Chooses the implementation of RMS normalisation for the tensors at hand."""

from __future__ import annotations

import torch

from kernels.cpu_library import DTYPE_NUMBERS, CpuLibrary, cpu_library
from kernels.cpu_structures import addresses_of
from kernels.gpu_config import is_triton_installed
from kernels.linear.rounding import InputRounding, RoundedRows, round_rows


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


def can_run(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Return True where the kernel supports these types and layouts."""
    return x.is_cpu and x.dtype in DTYPE_NUMBERS and weight.dtype is x.dtype and x.dim() == 2 and x.stride(1) == 1


def rms_norm_cpu(
    library: CpuLibrary, x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """Do what `kernels.rms_norm.rms_norm` promises; the residual, when there is one, has the type of `x`."""
    result = torch.empty(x.shape, dtype=x.dtype)
    sizes = (*x.shape, DTYPE_NUMBERS[x.dtype], torch.get_num_threads())
    library.rms_norm(*addresses_of(x, weight, residual, result), x.stride(0), eps, *sizes)
    return result


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None) -> torch.Tensor:
    """Scale each row to a root mean square of one, then by a learned weight; first add the row to its residual.

    The sum is rounded to the residual's type, and the rounded sum is normalised. Squares, mean and products
    are fp32, rounded once. Source: Zhang and Sennrich, arXiv 1910.07467, equation 4.

    Args:
        x: Rows may be strided.
        weight: Contiguous; of the type of `x`, or float32, for weights that 16 bits would round too much.
        eps: Added to the mean square.
        residual: Replaced by `residual + x`, in place; None normalises `x` itself. Contiguous.

    Shapes:
        x, residual, result: `[num_rows, size]`
        weight: `[size]`
    """
    if x.is_cuda and is_triton_installed():
        from kernels.rms_norm import triton_kernel

        if triton_kernel.can_run(x):
            return triton_kernel.rms_norm_triton(x, weight, eps, residual)
    if can_run(x, weight) and (library := cpu_library()) is not None:
        return rms_norm_cpu(library, x, weight, eps, residual)
    return rms_norm_reference(x, weight, eps, residual)


def rms_norm_rounded(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None, rounding: InputRounding
) -> RoundedRows:
    """Round what `rms_norm` returns, to the same bits, in one launch; for the GPUs that have products of such rows."""
    from kernels.rms_norm import triton_kernel

    if triton_kernel.can_run(x):
        return triton_kernel.rms_norm_rounded_triton(x, weight, eps, residual, rounding)
    return round_rows(rms_norm(x, weight, eps, residual), rounding)
