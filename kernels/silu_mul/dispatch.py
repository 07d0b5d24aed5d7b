"""Chooses the implementation of SiLU times a gate for the tensors at hand."""

from __future__ import annotations

import torch

from kernels.cpu_library import cpu_library
from kernels.gpu_config import gpu_of, is_triton_installed
from kernels.silu_mul.cpu import can_run, silu_mul_cpu
from kernels.silu_mul.reference import silu_mul_reference


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Return `silu(gate) * up` for rows that hold the gate's features, then the up projection's.

    Source: Shazeer, arXiv 2002.05202, equation 6.

    Args:
        gate_up: Contiguous.

    Shapes:
        gate_up: `[num_tokens, 2 * size]`
        result: `[num_tokens, size]`
    """
    if gate_up.is_cuda and is_triton_installed():
        from kernels.silu_mul.triton_kernel import silu_mul_triton

        return silu_mul_triton(gate_up, gpu_of(gate_up.device))
    if can_run(gate_up) and (library := cpu_library()) is not None:
        return silu_mul_cpu(library, gate_up)
    return silu_mul_reference(gate_up)
