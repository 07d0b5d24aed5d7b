"""Linear layers on 4-bit integers in plain torch: the oracle of the kernels."""

from __future__ import annotations

import torch

from kernels.int4_linear.weight import Int4Weight
from kernels.int8_linear.reference import dequantize_groups
from kernels.linear.dense.reference import linear_reference


def int4_linear_reference(
    x: torch.Tensor, weight: Int4Weight, bias: torch.Tensor | None = None, *, to_float32: bool = False
) -> torch.Tensor:
    """Do what `kernels.int4_linear.int4_linear` promises."""
    values = torch.stack((weight.values & 15, weight.values >> 4), dim=2).flatten(1)
    matrix = dequantize_groups(values, weight.scales, weight.offsets, weight.group_size).to(x.dtype)
    ordered = x if weight.input_order is None else x[:, weight.input_order]
    return linear_reference(ordered, matrix, bias, to_float32=to_float32)
