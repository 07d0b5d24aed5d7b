"""Nonlinear functions by the compiled CPU kernel (`cpu.cpp`)."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

from kernels.activation.reference import Activation
from kernels.cpu_library import DTYPE_NUMBERS, CpuLibrary
from kernels.cpu_structures import addresses_of

# The numbers of `FunctionNumber` in cpu.cpp. What is not here rounds nothing: torch's own operators do as well.
FUNCTIONS: Mapping[Activation, int] = MappingProxyType(
    {Activation.SILU: 0, Activation.GELU: 1, Activation.GELU_TANH: 2}
)
SIGMOID = 3


def can_run(x: torch.Tensor) -> bool:
    """Return True where the kernel supports the type; layouts are brought into the one that it takes."""
    return x.is_cpu and x.dtype in DTYPE_NUMBERS and x.dim() > 0


def activation_cpu(
    library: CpuLibrary, x: torch.Tensor, function: int, factor: torch.Tensor | None = None
) -> torch.Tensor:
    """Return a function of every number of `x`, times the number of `factor` at its place."""
    rows, factors = _rows(x), None if factor is None else _rows(factor)
    result = torch.empty(rows.shape, dtype=x.dtype)
    strides = rows.stride(0), 0 if factors is None else factors.stride(0)
    numbers = function, DTYPE_NUMBERS[x.dtype], torch.get_num_threads()
    library.activation(*addresses_of(rows, factors, result), *strides, *rows.shape, *numbers)
    return result.view(x.shape)


def silu_mul_cpu(library: CpuLibrary, gate_up: torch.Tensor) -> torch.Tensor:
    """Do what `kernels.activation.gated` promises of SiLU, for contiguous rows."""
    num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    result = torch.empty(num_rows, size, dtype=gate_up.dtype)
    library.silu_mul(
        gate_up.data_ptr(), result.data_ptr(), num_rows, size, DTYPE_NUMBERS[gate_up.dtype], torch.get_num_threads()
    )
    return result


def _rows(x: torch.Tensor) -> torch.Tensor:
    if x.dim() != 2:
        x = x.reshape(-1, x.shape[-1])
    return x if x.stride(1) == 1 else x.contiguous()
