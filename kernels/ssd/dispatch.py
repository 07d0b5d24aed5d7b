"""Chooses the implementation of the state-space recurrence."""

from __future__ import annotations

import ctypes

import torch

from kernels.cpu_library import DTYPE_NUMBERS, CpuLibrary, cpu_library
from kernels.cpu_structures import addresses_of
from kernels.gpu_config import gpu_of, is_triton_installed
from kernels.matrix_state.walk import can_run
from kernels.ssd.reference import SsdSizes, SsdWeights, ssd_chunked
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
        *addresses_of(features, steps, weights.rate, weights.step_bias, weights.skip, result, states),
        ctypes.byref(state_rows_structure(rows)),
        *(features.stride(0), steps.stride(0), sizes.num_groups, sizes.num_heads, sizes.state_size, sizes.head_dim),
        *(weights.min_step, weights.max_step, DTYPE_NUMBERS[features.dtype], torch.get_num_threads()),
    )
    return result


def ssd(
    features: torch.Tensor,
    steps: torch.Tensor,
    weights: SsdWeights,
    sizes: SsdSizes,
    states: torch.Tensor,
    rows: StateRows,
) -> torch.Tensor:
    """Update the state of each sequence token by token, and read it with the token's output vector.

    With the state `S`, a token's values `x`, the input and output vectors `B` and `C` of the head's group, and its step
    `d`, which is `softplus(step + step_bias)` within the bounds: `S = exp(-rate * d) * S + d * outer(B, x)`; the result
    is `S^T C + skip * x`. Source: Dao and Gu, arXiv 2405.21060, equation 1 with a scalar decay a head.

    On a CPU the result of a token and the state behind it do not depend on how its sequence was cut into steps, to the
    bit.

    Args:
        features: Per token the values of all heads, then the input vectors of all groups, then their output vectors.
            May be strided in its first dimension.
        steps: Of all heads, before their function. Likewise.
        weights: Of decays and of what passes the state by.
        sizes: Heads, groups and their widths.
        states: Of all slots; contiguous. Replaced by those behind the step's kept tokens.
        rows: The sequences.

    Shapes:
        features: `[num_tokens, num_heads * head_dim + 2 * num_groups * state_size]`
        steps: `[num_tokens, num_heads]`, of the type of `features`
        states: `[num_slots, num_heads, state_size, head_dim]` float32
        result: `[num_tokens, num_heads, head_dim]`, of the type of `features`
    """
    if features.is_cuda and is_triton_installed():
        from kernels.ssd.triton_kernel import ssd_triton

        return ssd_triton(features, steps, weights, sizes, states, rows, gpu_of(features.device))
    if can_run(features, steps, states) and (library := cpu_library()) is not None:
        return ssd_cpu(library, features, steps, weights, sizes, states, rows)
    return ssd_chunked(features, steps, weights, sizes, states, rows)
