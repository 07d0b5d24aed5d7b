"""Chooses the implementation of the short convolution for the tensors at hand."""

from __future__ import annotations

import ctypes

import torch
from torch.nn import functional

from kernels.cpu_library import DTYPE_NUMBERS, CpuLibrary, cpu_library
from kernels.cpu_structures import addresses_of
from kernels.gpu_config import is_triton_installed
from kernels.state_rows import StateRows, sequences_of, state_rows_structure


def causal_conv_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    states: torch.Tensor,
    rows: StateRows,
    *,
    has_silu: bool = True,
) -> torch.Tensor:
    """Compute what `kernels.causal_conv.causal_conv` promises."""
    result = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    width, channels = weight.shape
    filters = weight.to(torch.promote_types(x.dtype, torch.float32)).t()[:, None]
    for sequence in sequences_of(rows):
        before = states[sequence.slot]
        if sequence.is_new:
            before = torch.zeros_like(before)
        inputs = torch.cat((before.to(filters.dtype), x[sequence.first : sequence.end].to(filters.dtype)))
        summed = functional.conv1d(inputs.t()[None], filters, groups=channels)[0].t()
        if bias is not None:
            summed = summed + bias.to(filters.dtype)
        result[sequence.first : sequence.end] = functional.silu(summed) if has_silu else summed
        if not sequence.is_padding:
            for count, slot in (*sequence.saves, (sequence.num_kept, sequence.slot)):
                states[slot] = inputs[count : count + width - 1]
    return result


def can_run(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, states: torch.Tensor) -> bool:
    """Return True where the kernel supports the types and layouts."""
    return (
        x.is_cpu
        and x.dtype in DTYPE_NUMBERS
        and x.dtype is weight.dtype
        and states.dtype is torch.float32
        and (bias is None or bias.dtype is x.dtype)
        and x.stride(1) == 1
        and weight.is_contiguous()
        and states.is_contiguous()
    )


def causal_conv_cpu(
    library: CpuLibrary,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    states: torch.Tensor,
    rows: StateRows,
    *,
    has_silu: bool = True,
) -> torch.Tensor:
    """Do what `kernels.causal_conv.causal_conv` promises."""
    result = torch.empty(x.shape, dtype=x.dtype)
    numbers = x.shape[1], weight.shape[0], has_silu, DTYPE_NUMBERS[x.dtype], torch.get_num_threads()
    addresses = addresses_of(x, result, weight, bias, states)
    library.causal_conv(*addresses, ctypes.byref(state_rows_structure(rows)), x.stride(0), *numbers)
    return result


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
