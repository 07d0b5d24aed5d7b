"""SiLU times a gate by the compiled CPU kernel (`cpu.cpp`)."""

from __future__ import annotations

import torch

from kernels.cpu_library import DTYPE_NUMBERS, CpuLibrary


def can_run(gate_up: torch.Tensor) -> bool:
    """Return True where the kernel supports the type and layout."""
    return gate_up.is_cpu and gate_up.dtype in DTYPE_NUMBERS and gate_up.is_contiguous()


def silu_mul_cpu(library: CpuLibrary, gate_up: torch.Tensor) -> torch.Tensor:
    """Do what `kernels.silu_mul.silu_mul` promises."""
    num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    result = torch.empty(num_rows, size, dtype=gate_up.dtype)
    library.silu_mul(
        gate_up.data_ptr(), result.data_ptr(), num_rows, size, DTYPE_NUMBERS[gate_up.dtype], torch.get_num_threads()
    )
    return result
