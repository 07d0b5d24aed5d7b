"""Rounds inputs where that is not done, and chooses between the kernel and cuBLAS for the product."""

from __future__ import annotations

import torch

from kernels.gpu_config import Gpu, gpu_of
from kernels.linear.gpu_scaled.block_product import multiply_blocks
from kernels.linear.gpu_scaled.matrix import ScaledMatrix, is_kernel_preferred
from kernels.linear.rounding import InputRounding, RoundedRows, Rows, round_rows

# What cuBLAS asks of the sizes of float8 matrices.
_CUBLAS_MULTIPLE = 16


def scaled_linear(
    x: Rows, matrix: ScaledMatrix, bias: torch.Tensor | None = None, *, to_float32: bool = False
) -> torch.Tensor:
    """Round rows, multiply them by the matrix, and add the bias, in fp32.

    Args:
        x: float32, bfloat16 or float16, on the matrix's device; contiguous in its last dimension. Or such rows that are
            rounded as the matrix says.
        matrix: Of int8, or, on a GPU that multiplies those, of float8.
        bias: Added to every row.
        to_float32: Leave the result in fp32.

    Shapes:
        x: `[num_rows, in_features]`
        bias: `[out_features]`
        result: `[num_rows, out_features]`
    """
    out_dtype = torch.float32 if to_float32 else x.dtype
    num_rows = len(x)
    if num_rows == 0:
        return matrix.scales.new_empty((0, matrix.values.shape[0]), dtype=out_dtype)
    from kernels.linear.gpu_scaled.triton_product import scaled_linear_triton

    rounded = x if isinstance(x, RoundedRows) else round_rows(x, matrix.rounding)
    values, scales, gpu = rounded.values, rounded.scales, gpu_of(matrix.values.device)
    if not _is_cublas_better(matrix, num_rows, out_dtype, gpu):
        return scaled_linear_triton(values[:num_rows], scales[:num_rows], matrix, bias, out_dtype, gpu)
    if matrix.has_blocks:
        result = multiply_blocks(values, scales, matrix.values, matrix.scales)[:num_rows]
        return result if bias is None else result + bias.to(out_dtype)
    return torch._scaled_mm(
        values,
        matrix.values.t(),
        scale_a=scales,
        scale_b=matrix.scales[None, :],
        bias=None if bias is None else bias.to(out_dtype),
        out_dtype=out_dtype,
    )


def _is_cublas_better(matrix: ScaledMatrix, num_rows: int, out_dtype: torch.dtype, gpu: Gpu) -> bool:
    """Return True for the products that cuBLAS has, which are of float8 and in bfloat16, beyond few rows.

    Its products of integers leave int32 sums, which would be written and read once more to be scaled.
    """
    if matrix.values.dtype is not torch.float8_e4m3fn or out_dtype is not torch.bfloat16:
        return False
    is_aligned = all(size % _CUBLAS_MULTIPLE == 0 for size in matrix.values.shape)
    has_product = matrix.has_block_product if matrix.has_blocks else is_aligned
    return has_product and not is_kernel_preferred(gpu.generation, num_rows)


class ScaledLinear:
    """A linear layer on numbers of eight bits whose inputs are rounded too."""

    def __init__(self, matrix: ScaledMatrix, bias: torch.Tensor | None) -> None:
        self._matrix = matrix
        self._bias = bias
        self.rounding: InputRounding | None = matrix.rounding

    def __call__(self, x: Rows) -> torch.Tensor:
        """Multiply rows."""
        return scaled_linear(x, self._matrix, self._bias)

    def to_float32(self, x: Rows) -> torch.Tensor:
        """Multiply rows, not rounded to the type of `x`."""
        return scaled_linear(x, self._matrix, self._bias, to_float32=True)
