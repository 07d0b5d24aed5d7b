"""Chooses how a packed matrix is multiplied: unpacked in the product, or written out first."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kernels.gpu_config import gpu_of
from kernels.linear.gpu_packed.matrix import PackedMatrix, is_fused


def packed_linear(
    x: torch.Tensor, matrix: PackedMatrix, bias: torch.Tensor | None = None, *, to_float32: bool = False
) -> torch.Tensor:
    """Multiply rows by the matrix, summed in fp32, and add the bias.

    With few rows the weights are not rounded; with many they are rounded to the type of `x`.

    Args:
        x: float32, bfloat16 or float16, on the matrix's device.
        matrix: Of any kind.
        bias: Added to every row.
        to_float32: Return fp32; with many rows it has the precision of `x`.

    Shapes:
        x: `[num_rows, in_features]`
        bias: `[out_features]`
        result: `[num_rows, out_features]`
    """
    out_dtype = torch.float32 if to_float32 else x.dtype
    if x.shape[0] == 0:
        return x.new_empty((0, matrix.out_features), dtype=out_dtype)
    if matrix.input_order is not None:
        x = x[:, matrix.input_order]
    gpu = gpu_of(x.device)
    if x.dtype is not torch.float32 and is_fused(gpu.generation, x.shape[0]):
        from kernels.linear.gpu_packed.triton_product import packed_linear_triton

        return packed_linear_triton(x, matrix, bias, out_dtype, gpu)
    from kernels.linear.gpu_packed.triton_dequantize import dequantize_triton

    weight = dequantize_triton(matrix, x.dtype)
    return F.linear(x, weight, None if bias is None else bias.to(x.dtype)).to(out_dtype)
