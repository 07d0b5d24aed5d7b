"""Launches the Triton kernels of the gated delta rule."""

from __future__ import annotations

import torch

from kernels.gated_delta.launch_table import GATED_DELTA
from kernels.gated_delta.reference import NORM_EPS, DeltaSizes, DeltaWeights
from kernels.gated_delta.triton_chunks import gated_delta_chunks_kernel
from kernels.gated_delta.triton_steps import gated_delta_steps_kernel
from kernels.gpu_config import Gpu
from kernels.matrix_state.launch_config import read_table
from kernels.matrix_state.triton_launch import RuleKernels, launch_update
from kernels.state_rows import StateRows

_KERNELS = RuleKernels(gated_delta_steps_kernel, gated_delta_chunks_kernel, read_table(GATED_DELTA))


def gated_delta_triton(
    qkv: torch.Tensor,
    gates: torch.Tensor,
    weights: DeltaWeights,
    sizes: DeltaSizes,
    states: torch.Tensor,
    rows: StateRows,
    gpu: Gpu,
) -> torch.Tensor:
    """Compute what `kernels.gated_delta.gated_delta` promises."""
    shape = qkv.shape[0], sizes.num_value_heads, sizes.value_dim
    return launch_update(
        _KERNELS,
        _KERNELS.configs[gpu.generation],
        torch.empty(shape, dtype=qkv.dtype, device=qkv.device),
        (qkv, gates, weights.rate, weights.step_bias),
        states,
        rows,
        (qkv.stride(0), gates.stride(0), NORM_EPS, sizes.key_dim**-0.5),
        sizes.num_key_heads,
    )
