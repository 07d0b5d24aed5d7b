"""Chooses the implementation of a linear layer on 8-bit floating point numbers."""

from __future__ import annotations

import torch

from kernels.fp8_linear.reference import fp8_linear_reference
from kernels.fp8_linear.weight import Fp8Weight
from kernels.linear.gpu_packed import PackedMatrix, packed_linear
from kernels.linear.gpu_scaled import ScaledMatrix, scaled_linear


def fp8_linear(
    x: torch.Tensor,
    weight: Fp8Weight | PackedMatrix | ScaledMatrix,
    bias: torch.Tensor | None = None,
    *,
    to_float32: bool = False,
) -> torch.Tensor:
    """Multiply rows by a matrix, and add the bias, in fp32.

    Where inputs are quantized, each row, or block of it, is rounded to float8_e4m3fn times its scale, its largest
    magnitude divided by 448, or the scale that is given; what exceeds the type's range becomes its limit. Where they
    are not, the matrix is rounded to the type of `x`.

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
    return fp8_linear_reference(x, weight, bias, to_float32=to_float32)
