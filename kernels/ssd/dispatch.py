"""Chooses the implementation of the state-space recurrence."""

from __future__ import annotations

import ctypes

import torch

from kernels.cpu_library import DTYPE_NUMBERS, CpuLibrary, cpu_library
from kernels.cpu_structures import addresses_of
from kernels.gpu_config import gpu_of, is_triton_installed
from kernels.matrix_state.walk import can_run
from kernels.ssd.reference import SsdStep, ssd_chunked
from kernels.state_rows import state_rows_structure


def ssd_cpu(library: CpuLibrary, step: SsdStep) -> torch.Tensor:
    """Do what `kernels.ssd.ssd` promises."""
    features, gates, weights, sizes = step.features, step.gates, step.weights, step.sizes
    result = step.empty_result()
    library.ssd(
        *addresses_of(features, gates, weights.rate, weights.step_bias, weights.skip, result, step.states),
        ctypes.byref(state_rows_structure(step.rows)),
        *(features.stride(0), gates.stride(0), sizes.num_groups, sizes.num_heads, sizes.state_size, sizes.head_dim),
        *(weights.min_step, weights.max_step, DTYPE_NUMBERS[features.dtype], torch.get_num_threads()),
    )
    return result


def ssd(step: SsdStep) -> torch.Tensor:
    """Update the state of each sequence token by token, and read it with the token's output vector.

    With the state `S`, a token's values `x`, the input and output vectors `B` and `C` of the head's group, and its step
    `d`, which is `softplus(step + step_bias)` within the bounds: `S = exp(-rate * d) * S + d * outer(B, x)`; the result
    is `S^T C + skip * x`. Source: Dao and Gu, arXiv 2405.21060, equation 1 with a scalar decay a head.

    On a CPU the result of a token and the state behind it do not depend on how its sequence was cut into steps, to the
    bit.

    Shapes:
        features: `[num_tokens, num_heads * head_dim + 2 * num_groups * state_size]`: the values of all heads, then the
            input vectors of all groups, then their output vectors
        gates: `[num_tokens, num_heads]`: the steps of all heads
        states: `[num_slots, num_heads, state_size, head_dim]`
        result: `[num_tokens, num_heads, head_dim]`, of the type of `features`
    """
    if step.features.is_cuda and is_triton_installed():
        from kernels.ssd.triton_kernel import ssd_triton

        return ssd_triton(step, gpu_of(step.features.device))
    if can_run(step) and (library := cpu_library()) is not None:
        return ssd_cpu(library, step)
    return ssd_chunked(step)
