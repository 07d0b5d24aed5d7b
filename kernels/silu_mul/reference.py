"""SiLU times a gate in plain torch: the oracle of the kernel, and what runs where there is none."""

from __future__ import annotations

import torch


def silu_mul_reference(gate_up: torch.Tensor) -> torch.Tensor:
    """Compute what `kernels.silu_mul.silu_mul` promises; 16-bit types are rounded once more, after SiLU."""
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate).mul_(up)
