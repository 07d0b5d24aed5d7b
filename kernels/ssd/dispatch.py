"""Chooses the implementation of Mamba-2's state update for the tensors at hand."""

from __future__ import annotations

import torch

from kernels.cpu_library import cpu_library
from kernels.gpu_config import gpu_of, is_triton_installed
from kernels.matrix_state.cpu import can_run
from kernels.ssd.chunked import ssd_chunked
from kernels.ssd.cpu import ssd_cpu
from kernels.ssd.reference import SsdSizes, SsdWeights
from kernels.state_rows import StateRows


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
