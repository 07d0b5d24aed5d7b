"""Chooses the implementation of a linear layer on 4-bit integers."""

from __future__ import annotations

import torch

from kernels.int4_linear.reference import int4_linear_reference
from kernels.int4_linear.weight import Int4Weight
from kernels.linear.gpu_packed import PackedMatrix, packed_linear


def int4_linear(
    x: torch.Tensor, weight: Int4Weight | PackedMatrix, bias: torch.Tensor | None = None, *, to_float32: bool = False
) -> torch.Tensor:
    """Multiply rows by the matrix, its values rounded to the type of `x`, or not at all, and add the bias.

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
    return int4_linear_reference(x, weight, bias, to_float32=to_float32)
