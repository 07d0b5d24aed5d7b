# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Quantizes inputs to 8 bits: largest magnitude, scale and values of a token in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.dependent_launch import dependent_launch, wait_for_inputs
from kernels.linear.forms import SCALE_BLOCK
from kernels.linear.gpu_scaled.block_product import ROW_MULTIPLE

_BLOCKS_PER_PROGRAM = 8
# Elements of a token that a warp has at most.
_PER_WARP = 2048


@triton.jit(do_not_specialize=["part_stride"])
def quantize_tokens_kernel(
    x,
    given_scale,
    values,
    scales,
    row_size,
    num_parts,
    x_stride,
    part_stride,
    MAX: tl.constexpr,
    PART: tl.constexpr,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Program (token, parts of it): each part of `PART` columns, in a tile of `WIDTH`, has a scale."""
    wait_for_inputs()
    row = tl.program_id(0).to(tl.int64)
    parts = tl.program_id(1) * PARTS + tl.arange(0, PARTS)
    local = tl.arange(0, WIDTH)
    columns = parts[:, None] * PART + local[None, :]
    mask = (columns < row_size) & (local[None, :] < PART)
    numbers = tl.load(x + row * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    if given_scale is not None:
        scale = tl.zeros([PARTS], dtype=tl.float32) + tl.load(given_scale)
    else:
        largest = tl.max(tl.abs(numbers), axis=1)
        # A token of zeros must not be divided by zero.
        scale = tl.maximum(tl.div_rn(largest, tl.full([PARTS], MAX, dtype=tl.float32)), 1e-12)
    steps = tl.div_rn(numbers, tl.broadcast_to(scale[:, None], [PARTS, WIDTH]))
    if values.dtype.element_ty == tl.int8:
        # Adding 1.5 * 2^23 leaves no bits below one: rounded to the nearest, halves to even.
        steps = (tl.clamp(steps, -MAX - 1.0, MAX) + 12582912.0) - 12582912.0
    else:
        steps = tl.clamp(steps, -MAX, MAX)
    tl.store(values + row * row_size + columns, steps.to(values.dtype.element_ty), mask=mask)
    tl.store(scales + parts.to(tl.int64) * part_stride + row, scale, mask=parts < num_parts)


def quantize_tokens_triton(
    x: torch.Tensor, dtype: torch.dtype, given_scale: torch.Tensor | None = None, *, has_blocks: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize rows to int8 or float8_e4m3fn, with a scale each, or one a block of columns, or the one given.

    Shapes:
        x: `[num_rows, num_columns]`
        given_scale: `[]` float32
        values: `[padded_rows, num_columns]`, of which rows beyond `num_rows` mean nothing
        scales: `[padded_rows, num_parts]` float32, likewise; those of a part lie side by side
    """
    num_rows, row_size = x.shape
    part = SCALE_BLOCK if has_blocks else row_size
    num_parts = triton.cdiv(row_size, part)
    width = triton.next_power_of_2(part)
    parts = _BLOCKS_PER_PROGRAM if has_blocks else 1
    padded_rows = -(-num_rows // ROW_MULTIPLE) * ROW_MULTIPLE if has_blocks else num_rows
    values = torch.empty((padded_rows, row_size), dtype=dtype, device=x.device)
    scales = torch.empty((num_parts, padded_rows), dtype=torch.float32, device=x.device).t()
    quantize_tokens_kernel[(num_rows, triton.cdiv(num_parts, parts))](
        x,
        given_scale,
        values,
        scales,
        row_size,
        num_parts,
        x.stride(0),
        padded_rows,
        MAX=127.0 if dtype is torch.int8 else 448.0,
        PART=part,
        WIDTH=width,
        PARTS=parts,
        num_warps=max(1, min(16, width * parts // _PER_WARP)),
        **dependent_launch(x.device),
    )
    return values, scales
