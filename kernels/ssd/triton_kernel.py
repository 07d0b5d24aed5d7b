"""Launches the Triton kernels of Mamba-2's state update."""

from __future__ import annotations

import torch

from kernels.gpu_config import Gpu
from kernels.matrix_state.launch_config import read_table
from kernels.matrix_state.triton_launch import RuleKernels, launch_update
from kernels.ssd.launch_table import SSD
from kernels.ssd.reference import SsdSizes, SsdWeights
from kernels.ssd.triton_chunks import ssd_chunks_kernel
from kernels.ssd.triton_steps import ssd_steps_kernel
from kernels.state_rows import StateRows

_KERNELS = RuleKernels(ssd_steps_kernel, ssd_chunks_kernel, read_table(SSD))


def ssd_triton(
    features: torch.Tensor,
    steps: torch.Tensor,
    weights: SsdWeights,
    sizes: SsdSizes,
    states: torch.Tensor,
    rows: StateRows,
    gpu: Gpu,
) -> torch.Tensor:
    """Compute what `kernels.ssd.ssd` promises."""
    shape = features.shape[0], sizes.num_heads, sizes.head_dim
    return launch_update(
        _KERNELS,
        _KERNELS.configs[gpu.generation],
        torch.empty(shape, dtype=features.dtype, device=features.device),
        (features, steps, weights.rate, weights.step_bias, weights.skip),
        states,
        rows,
        (features.stride(0), steps.stride(0), weights.min_step, weights.max_step),
        sizes.num_groups,
    )
