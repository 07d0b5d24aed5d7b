"""The gated delta rule by the compiled CPU kernel (`cpu.cpp`)."""

from __future__ import annotations

import ctypes

import torch

from kernels.cpu_library import DTYPE_NUMBERS, CpuLibrary
from kernels.gated_delta.reference import DeltaSizes, DeltaWeights
from kernels.state_rows import StateRows, state_rows_structure


def gated_delta_cpu(
    library: CpuLibrary,
    qkv: torch.Tensor,
    gates: torch.Tensor,
    weights: DeltaWeights,
    sizes: DeltaSizes,
    states: torch.Tensor,
    rows: StateRows,
) -> torch.Tensor:
    """Do what `kernels.gated_delta.gated_delta` promises."""
    result = torch.empty(qkv.shape[0], sizes.num_value_heads, sizes.value_dim, dtype=qkv.dtype)
    library.gated_delta(
        qkv.data_ptr(),
        gates.data_ptr(),
        weights.rate.data_ptr(),
        weights.step_bias.data_ptr(),
        result.data_ptr(),
        states.data_ptr(),
        ctypes.byref(state_rows_structure(rows)),
        qkv.stride(0),
        gates.stride(0),
        sizes.num_key_heads,
        sizes.num_value_heads,
        sizes.key_dim,
        sizes.value_dim,
        DTYPE_NUMBERS[qkv.dtype],
        torch.get_num_threads(),
    )
    return result
