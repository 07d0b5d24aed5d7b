"""Linear layers on 8-bit integers in plain torch: the oracle of the kernels."""

from __future__ import annotations

import torch

from kernels.int8_linear.weight import Int8GroupWeight, Int8Weight
from kernels.linear.dense.reference import linear_reference

_MAX = 127
# A row of zeros must not be divided by zero.
_MIN_SCALE = 1e-12


def dequantize_groups(
    values: torch.Tensor, scales: torch.Tensor, offsets: torch.Tensor, group_size: int
) -> torch.Tensor:
    """Return `scale * q + offset` in float32.

    Shapes:
        values, result: `[rows, columns]`
        scales, offsets: `[rows, ceil(columns / group_size)]` float32
    """
    columns = values.shape[1]
    scales, offsets = (part.repeat_interleave(group_size, dim=1)[:, :columns] for part in (scales, offsets))
    return values.float() * scales + offsets


def int8_group_linear_reference(
    x: torch.Tensor, weight: Int8GroupWeight, bias: torch.Tensor | None = None, *, to_float32: bool = False
) -> torch.Tensor:
    """Do what `kernels.int8_linear.int8_group_linear` promises."""
    matrix = dequantize_groups(weight.values, weight.scales, weight.offsets, weight.group_size).to(x.dtype)
    ordered = x if weight.input_order is None else x[:, weight.input_order]
    return linear_reference(ordered, matrix, bias, to_float32=to_float32)


def int8_linear_reference(
    x: torch.Tensor, weight: Int8Weight, bias: torch.Tensor | None = None, *, to_float32: bool = False
) -> torch.Tensor:
    """Do what `kernels.int8_linear.int8_linear` promises."""
    if weight.activation == "none":
        matrix = (weight.values.float() * weight.scales).to(x.dtype)
        return linear_reference(x, matrix, bias, to_float32=to_float32)
    values, scales = quantize_tokens(x, weight.activation_scale)
    # Sums of products of integers are exact in float64, as they are in int32.
    sums = values.double() @ weight.values.double().T
    result = sums.float() * scales * weight.scales.T
    if bias is not None:
        result += bias.float()
    return result if to_float32 else result.to(x.dtype)


def quantize_tokens(x: torch.Tensor, scale: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize rows to int8, with a scale each or with the one that is given.

    Shapes:
        x, values: `[num_rows, num_columns]`
        scale: `[]`
        scales: `[num_rows, 1]`, or as `scale`
    """
    rows = x.float()
    scales = (rows.abs().amax(dim=1, keepdim=True) / _MAX).clamp(min=_MIN_SCALE) if scale is None else scale
    return (rows / scales).round().clamp(-_MAX - 1, _MAX).to(torch.int8), scales
