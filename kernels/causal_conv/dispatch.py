"""Chooses the implementation of the short convolution for the tensors at hand."""

from __future__ import annotations

import torch

from kernels.causal_conv.cpu import can_run, causal_conv_cpu
from kernels.causal_conv.reference import causal_conv_reference
from kernels.cpu_library import cpu_library
from kernels.gpu_config import is_triton_installed
from kernels.state_rows import StateRows


def causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    states: torch.Tensor,
    rows: StateRows,
    *,
    has_silu: bool = True,
) -> torch.Tensor:
    """Return for each token and channel the sum of its last `width` inputs, each times a weight of the channel.

    Inputs before the step's tokens come from the state; before a sequence's first token they are zero. Sums and SiLU
    are computed in fp32 and rounded once.

    Args:
        x: May be strided in its first dimension.
        weight: The last row belongs to the token itself. Contiguous.
        bias: Added before SiLU.
        states: The last `width - 1` inputs of each sequence, oldest first; replaced by those behind the step's kept
            tokens.
        rows: The sequences.
        has_silu: SiLU is applied to the sums.

    Shapes:
        x, result: `[num_tokens, channels]`
        weight: `[width, channels]`, of the type of `x`
        bias: `[channels]`, likewise
        states: `[num_slots, width - 1, channels]` float32
    """
    if x.is_cuda and is_triton_installed():
        from kernels.causal_conv.triton_kernel import causal_conv_triton

        return causal_conv_triton(x, weight, bias, states, rows, has_silu=has_silu)
    if can_run(x, weight, bias, states) and (library := cpu_library()) is not None:
        return causal_conv_cpu(library, x, weight, bias, states, rows, has_silu=has_silu)
    return causal_conv_reference(x, weight, bias, states, rows, has_silu=has_silu)
