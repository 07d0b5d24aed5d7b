"""Chooses the implementation of a linear layer on 8-bit integers."""

from __future__ import annotations

import torch

from kernels.int8_linear.reference import int8_group_linear_reference, int8_linear_reference
from kernels.int8_linear.weight import Int8GroupWeight, Int8Weight
from kernels.linear.gpu_packed import PackedMatrix, packed_linear
from kernels.linear.gpu_scaled import ScaledMatrix, scaled_linear


def int8_group_linear(
    x: torch.Tensor,
    weight: Int8GroupWeight | PackedMatrix,
    bias: torch.Tensor | None = None,
    *,
    to_float32: bool = False,
) -> torch.Tensor:
    """Multiply rows by a matrix in groups, its values rounded to the type of `x`, or not at all, and add the bias.

    Args:
        x: float32, bfloat16 or float16.
        weight: On the same device; packed where there is a kernel.
        bias: Added to every row.
        to_float32: Leave the result in fp32.

    Shapes:
        x: `[num_rows, in_features]`
        bias: `[out_features]`
        result: `[num_rows, out_features]`
    """
    if isinstance(weight, PackedMatrix):
        return packed_linear(x, weight, bias, to_float32=to_float32)
    return int8_group_linear_reference(x, weight, bias, to_float32=to_float32)


def int8_linear(
    x: torch.Tensor,
    weight: Int8Weight | PackedMatrix | ScaledMatrix,
    bias: torch.Tensor | None = None,
    *,
    to_float32: bool = False,
) -> torch.Tensor:
    """Multiply rows by a matrix, and add the bias in fp32.

    Where inputs are quantized, each row is rounded to the nearest integers of its scale, its largest magnitude divided
    by 127, or of the scale that is given; products are summed exactly.

    Args:
        x: float32, bfloat16 or float16.
        weight: On the same device; packed where there is a kernel.
        bias: Added to every row.
        to_float32: Leave the result in fp32.

    Shapes:
        x: `[num_rows, in_features]`
        bias: `[out_features]`
        result: `[num_rows, out_features]`
    """
    if isinstance(weight, ScaledMatrix):
        return scaled_linear(x, weight, bias, to_float32=to_float32)
    if isinstance(weight, PackedMatrix):
        return packed_linear(x, weight, bias, to_float32=to_float32)
    return int8_linear_reference(x, weight, bias, to_float32=to_float32)
