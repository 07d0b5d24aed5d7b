"""Linear layers on 8-bit floating point numbers in plain torch: the oracle of the kernels."""

from __future__ import annotations

import torch

from kernels.fp8_linear.weight import SCALE_BLOCK, Fp8Weight
from kernels.linear.dense.reference import linear_reference

_MAX = 448.0
# A row of zeros must not be divided by zero.
_MIN_SCALE = 1e-12


def fp8_linear_reference(
    x: torch.Tensor, weight: Fp8Weight, bias: torch.Tensor | None = None, *, to_float32: bool = False
) -> torch.Tensor:
    """Do what `kernels.fp8_linear.fp8_linear` promises."""
    matrix = dequantize_fp8(weight)
    if weight.activation == "none":
        return linear_reference(x, matrix.to(x.dtype), bias, to_float32=to_float32)
    rows = round_tokens(x, weight)
    result = linear_reference(rows, matrix, bias)
    return result if to_float32 else result.to(x.dtype)


def dequantize_fp8(weight: Fp8Weight) -> torch.Tensor:
    """Return the matrix in float32."""
    num_rows, num_columns = weight.values.shape
    scales = weight.scales
    if weight.has_blocks:
        scales = scales.repeat_interleave(SCALE_BLOCK, dim=0)[:num_rows]
        scales = scales.repeat_interleave(SCALE_BLOCK, dim=1)[:, :num_columns]
    return weight.values.float() * scales


def round_tokens(x: torch.Tensor, weight: Fp8Weight) -> torch.Tensor:
    """Return the rows as float8 numbers and their scales stand for, in float32.

    Shapes:
        x, result: `[num_rows, in_features]`
    """
    rows = x.float()
    if weight.activation_scale is not None:
        return _rounded(rows, weight.activation_scale)
    block = SCALE_BLOCK if weight.has_blocks else rows.shape[1]
    parts = [rows[:, first : first + block] for first in range(0, rows.shape[1], block)]
    return torch.cat([_rounded(part, _scale(part)) for part in parts], dim=1)


def _scale(rows: torch.Tensor) -> torch.Tensor:
    return (rows.abs().amax(dim=1, keepdim=True) / _MAX).clamp(min=_MIN_SCALE)


def _rounded(rows: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (rows / scale).clamp(-_MAX, _MAX).to(torch.float8_e4m3fn).float() * scale
