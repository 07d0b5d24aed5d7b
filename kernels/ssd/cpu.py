"""Mamba-2's state update by the compiled CPU kernel (`cpu.cpp`)."""

from __future__ import annotations

import ctypes

import torch

from kernels.cpu_library import DTYPE_NUMBERS, CpuLibrary
from kernels.ssd.reference import SsdSizes, SsdWeights
from kernels.state_rows import StateRows, state_rows_structure


def ssd_cpu(
    library: CpuLibrary,
    features: torch.Tensor,
    steps: torch.Tensor,
    weights: SsdWeights,
    sizes: SsdSizes,
    states: torch.Tensor,
    rows: StateRows,
) -> torch.Tensor:
    """Do what `kernels.ssd.ssd` promises."""
    result = torch.empty(features.shape[0], sizes.num_heads, sizes.head_dim, dtype=features.dtype)
    library.ssd(
        features.data_ptr(),
        steps.data_ptr(),
        weights.rate.data_ptr(),
        weights.step_bias.data_ptr(),
        weights.skip.data_ptr(),
        result.data_ptr(),
        states.data_ptr(),
        ctypes.byref(state_rows_structure(rows)),
        features.stride(0),
        steps.stride(0),
        sizes.num_groups,
        sizes.num_heads,
        sizes.state_size,
        sizes.head_dim,
        weights.min_step,
        weights.max_step,
        DTYPE_NUMBERS[features.dtype],
        torch.get_num_threads(),
    )
    return result
