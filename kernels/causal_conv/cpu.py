"""The short convolution by the compiled CPU kernel (`cpu.cpp`)."""

from __future__ import annotations

import ctypes

import torch

from kernels.cpu_library import DTYPE_NUMBERS, CpuLibrary
from kernels.cpu_structures import address_of
from kernels.state_rows import StateRows, state_rows_structure


def can_run(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, states: torch.Tensor) -> bool:
    """Return True where the kernel supports the types and layouts."""
    return (
        x.is_cpu
        and x.dtype in DTYPE_NUMBERS
        and x.dtype is weight.dtype
        and states.dtype is torch.float32
        and (bias is None or bias.dtype is x.dtype)
        and x.stride(1) == 1
        and weight.is_contiguous()
        and states.is_contiguous()
    )


def causal_conv_cpu(
    library: CpuLibrary,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    states: torch.Tensor,
    rows: StateRows,
    *,
    has_silu: bool = True,
) -> torch.Tensor:
    """Do what `kernels.causal_conv.causal_conv` promises."""
    result = torch.empty(x.shape, dtype=x.dtype)
    library.causal_conv(
        x.data_ptr(),
        result.data_ptr(),
        weight.data_ptr(),
        address_of(bias),
        states.data_ptr(),
        ctypes.byref(state_rows_structure(rows)),
        x.stride(0),
        x.shape[1],
        weight.shape[0],
        has_silu,
        DTYPE_NUMBERS[x.dtype],
        torch.get_num_threads(),
    )
    return result
