"""The short convolution in plain torch: the oracle of the kernels, and what runs where there is none."""

from __future__ import annotations

import torch
from torch.nn import functional

from kernels.state_rows import StateRows, sequences_of


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
