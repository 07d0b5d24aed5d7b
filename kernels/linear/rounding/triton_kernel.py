# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Rounds inputs to 8 bits: largest magnitude, scale and values of a token in one launch, or in that of another op."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.dependent_launch import dependent_launch, wait_for_inputs
from kernels.linear.forms import SCALE_BLOCK
from kernels.linear.rounding.rows import InputRounding, RoundedRows

BLOCKS_PER_PROGRAM = 8
# Elements of a token that a warp has at most.
_PER_WARP = 2048


@triton.jit
def round_tile(numbers, given_scale, NUMBER: tl.constexpr):
    """Return `[PARTS, WIDTH]` float32 numbers in steps of their part's scale, rounded to `NUMBER`, and the scales."""
    PARTS: tl.constexpr = numbers.shape[0]
    WIDTH: tl.constexpr = numbers.shape[1]
    MAX: tl.constexpr = 127.0 if tl.int8 == NUMBER else 448.0
    if given_scale is not None:
        scale = tl.zeros([PARTS], dtype=tl.float32) + tl.load(given_scale)
    else:
        largest = tl.max(tl.abs(numbers), axis=1)
        # A token of zeros must not be divided by zero.
        scale = tl.maximum(tl.div_rn(largest, tl.full([PARTS], MAX, dtype=tl.float32)), 1e-12)
    steps = tl.div_rn(numbers, tl.broadcast_to(scale[:, None], [PARTS, WIDTH]))
    if tl.int8 == NUMBER:
        # Adding 1.5 * 2^23 leaves no bits below one: rounded to the nearest, halves to even.
        steps = (tl.clamp(steps, -MAX - 1.0, MAX) + 12582912.0) - 12582912.0
    else:
        steps = tl.clamp(steps, -MAX, MAX)
    return steps.to(NUMBER), scale


@triton.jit
def store_rounded(
    values,
    scales,
    given_scale,
    numbers,
    rows,
    is_row,
    first,
    row_size,
    part_stride,
    WIDTH: tl.constexpr,
    INTERLEAVES: tl.constexpr = False,
):
    """Round a tile of rows, `[ROWS, SIZE]` float32 from column `first` on, and store it; a part has `WIDTH` columns.

    With `INTERLEAVES` the first and the second half of a part's columns take turns.
    """
    ROWS: tl.constexpr = numbers.shape[0]
    SIZE: tl.constexpr = numbers.shape[1]
    PARTS: tl.constexpr = SIZE // WIDTH
    steps, scale = round_tile(tl.reshape(numbers, [ROWS * PARTS, WIDTH]), given_scale, values.dtype.element_ty)
    if INTERLEAVES:
        steps = tl.permute(tl.reshape(steps, [ROWS * PARTS, 2, WIDTH // 2]), [0, 2, 1])
    columns = first + tl.arange(0, SIZE)
    places = rows.to(tl.int64)[:, None] * row_size + columns[None, :]
    tl.store(values + places, tl.reshape(steps, [ROWS, SIZE]), mask=is_row[:, None] & (columns < row_size)[None, :])
    parts = first // WIDTH + tl.arange(0, PARTS)
    scale_places = parts.to(tl.int64)[None, :] * part_stride + rows[:, None]
    mask = is_row[:, None] & (parts * WIDTH < row_size)[None, :]
    tl.store(scales + scale_places, tl.reshape(scale, [ROWS, PARTS]), mask=mask)


@triton.jit(do_not_specialize=["part_stride"])
def quantize_tokens_kernel(
    x,
    given_scale,
    values,
    scales,
    x_size,
    row_size,
    x_stride,
    part_stride,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    INTERLEAVES: tl.constexpr,
):
    """Program (token, `SIZE` columns of it): each part of `WIDTH` columns has a scale; beyond `x_size` are zeros."""
    wait_for_inputs()
    rows = tl.program_id(0) + tl.arange(0, 1)
    first = tl.program_id(1) * SIZE
    columns = first + tl.arange(0, SIZE)
    places = x + rows.to(tl.int64)[:, None] * x_stride + columns[None, :]
    numbers = tl.load(places, mask=(columns < x_size)[None, :], other=0.0).to(tl.float32)
    store_rounded(
        values, scales, given_scale, numbers, rows, rows >= 0, first, row_size, part_stride, WIDTH, INTERLEAVES
    )


def part_width(row_size: int, rounding: InputRounding) -> int:
    """Return the columns of a tile that share a scale."""
    return SCALE_BLOCK if rounding.has_blocks else triton.next_power_of_2(row_size)


def quantize_tokens_triton(x: torch.Tensor, rounding: InputRounding, *, interleaves: bool = False) -> RoundedRows:
    """Round rows `[num_rows, num_columns]`.

    With `interleaves` rows are padded to whole blocks, and the first and the second half of a block's columns take
    turns, as in words of packed float8 matrices.
    """
    num_rows, row_size = x.shape
    if interleaves:
        assert rounding.has_blocks
        row_size = -(-row_size // SCALE_BLOCK) * SCALE_BLOCK
    width = part_width(row_size, rounding)
    size = width * (BLOCKS_PER_PROGRAM if rounding.has_blocks else 1)
    rounded = rounding.empty(num_rows, row_size, x.dtype, x.device)
    quantize_tokens_kernel[(num_rows, triton.cdiv(row_size, size))](
        x,
        rounding.given_scale,
        rounded.values,
        rounded.scales,
        x.shape[1],
        row_size,
        x.stride(0),
        rounded.scales.stride(1),
        WIDTH=width,
        SIZE=size,
        INTERLEAVES=interleaves,
        num_warps=max(1, min(16, size // _PER_WARP)),
        **dependent_launch(x.device),
    )
    return rounded
