# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Product of float8 rows with the packed float8 matrices of their experts on a GPU, a scale a block of either.

A word of a packed block has the numbers of two columns, so its bytes are those of the first half of the columns and of
the second by turns. Sums do not depend on their order: rows are rounded into the same one, and nothing is unpacked.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.dependent_launch import wait_for_inputs
from kernels.linear.gpu_packed.triton_unpack import load_words, number_of
from kernels.moe.triton_tile import find_rows, store_tile


@triton.jit(do_not_specialize=["input_scale_stride"])
def scaled_experts_kernel(
    inputs,
    input_scales,
    numbers,
    scales,
    bias,
    outputs,
    sorted_pairs,
    row_starts,
    block_ends,
    num_experts,
    out_features,
    num_blocks,
    input_scale_stride,
    scales_stride,
    padded_rows,
    slope,
    cubic,
    limit,
    up_shift,
    BLOCK_K: tl.constexpr,
    SCALES: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TOP_K: tl.constexpr,
    IS_FIRST: tl.constexpr,
    HAS_GATE: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Program (block of features, block of rows). `numbers` are the bytes of the words, BLOCK_K of a row and block."""
    wait_for_inputs()
    row_block = tl.program_id(1)
    if row_block >= tl.load(block_ends + num_experts - 1):
        return
    expert, is_row, sources, targets = find_rows(
        sorted_pairs, row_starts, block_ends, row_block, num_experts, TOP_K, IS_FIRST, EXPERTS, BLOCK_M
    )
    first_feature = tl.program_id(0) * BLOCK_N
    local = tl.arange(0, BLOCK_N)
    columns = tl.arange(0, BLOCK_K)
    tile_size = num_blocks.to(tl.int64) * TILE_ROWS * BLOCK_K
    first_tile = expert.to(tl.int64) * (padded_rows // TILE_ROWS) + first_feature // TILE_ROWS
    rows = (local // TILE_ROWS) * tile_size + (local % TILE_ROWS) * BLOCK_K
    number_places = numbers + first_tile * tile_size + rows[:, None] + columns[None, :]
    scale_rows = expert.to(tl.int64) * scales_stride + first_feature + local
    scale_words = load_words(scales, scale_rows, 0, padded_rows, SCALES)
    input_places = inputs + sources.to(tl.int64)[None, :] * (num_blocks * BLOCK_K) + columns[:, None]
    sums = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    for block in range(num_blocks):
        tile = tl.load(number_places + block * (TILE_ROWS * BLOCK_K))
        values = tl.load(input_places + block * BLOCK_K, mask=is_row[None, :], other=0.0)
        scale_places = input_scales + input_scale_stride.to(tl.int64) * block + sources
        input_scale = tl.load(scale_places, mask=is_row, other=0.0)
        products = tl.dot(tile, values)
        sums += products * input_scale[None, :] * number_of(scale_words, 0, SCALES)[:, None]
        # Of the next block: they arrive while its numbers are waited for and multiplied.
        scale_words = load_words(scales, scale_rows, tl.minimum(block + 1, num_blocks - 1), padded_rows, SCALES)
    activation = (slope, cubic, limit, up_shift)
    store_tile(
        sums, bias, outputs, expert, first_feature, out_features, targets, is_row, activation, IS_FIRST, HAS_GATE
    )
