# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Product of rows with the packed matrices of their experts on a GPU, which are unpacked in registers.

The arithmetic is that of `kernels.linear.gpu_packed.triton_product`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.dependent_launch import wait_for_inputs
from kernels.linear.gpu_packed.triton_unpack import load_words, number_of, unpack
from kernels.moe.triton_tile import find_rows, store_tile


@triton.jit
def packed_experts_kernel(
    inputs,
    words,
    scales,
    offsets,
    input_order,
    bias,
    outputs,
    sorted_pairs,
    row_starts,
    block_ends,
    num_experts,
    out_features,
    in_features,
    input_stride,
    num_blocks,
    scales_stride,
    offsets_stride,
    padded_rows,
    slope,
    cubic,
    limit,
    up_shift,
    KIND: tl.constexpr,
    PLANE: tl.constexpr,
    NUM_PLANES: tl.constexpr,
    PLANES_PER_PART: tl.constexpr,
    SCALES: tl.constexpr,
    OFFSETS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TOP_K: tl.constexpr,
    IS_FIRST: tl.constexpr,
    HAS_GATE: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    IS_EVEN: tl.constexpr,
):
    """Program (block of features, block of rows). `IS_EVEN`: the last block of columns is full."""
    wait_for_inputs()
    row_block = tl.program_id(1)
    if row_block >= tl.load(block_ends + num_experts - 1):
        return
    dtype: tl.constexpr = inputs.dtype.element_ty
    expert, is_row, sources, targets = find_rows(
        sorted_pairs, row_starts, block_ends, row_block, num_experts, TOP_K, IS_FIRST, EXPERTS, BLOCK_M
    )
    first_feature = tl.program_id(0) * BLOCK_N
    local = tl.arange(0, BLOCK_N)
    columns = tl.arange(0, PLANE)
    tile_size = num_blocks.to(tl.int64) * TILE_ROWS * PLANE
    first_tile = expert.to(tl.int64) * (padded_rows // TILE_ROWS) + first_feature // TILE_ROWS
    tile_words = (local // TILE_ROWS) * tile_size + (local % TILE_ROWS) * PLANE
    word_places = words + first_tile * tile_size + tile_words[:, None] + columns[None, :]
    scale_rows = expert.to(tl.int64) * scales_stride + first_feature + local
    offset_rows = expert.to(tl.int64) * offsets_stride + first_feature + local
    scale_words = load_words(scales, scale_rows, 0, padded_rows, SCALES)
    offset_words = load_words(offsets, offset_rows, 0, padded_rows, OFFSETS)
    input_places = inputs + sources.to(tl.int64)[None, :] * input_stride
    sums = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    if offsets is not None:
        ones = tl.full([BLOCK_N, PLANE], 1.0, dtype=dtype)
    for block in range(num_blocks):
        tile = tl.load(word_places + block * (TILE_ROWS * PLANE))
        for part in tl.static_range(NUM_PLANES // PLANES_PER_PART):
            column = (block * NUM_PLANES + part * PLANES_PER_PART) * PLANE
            products = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
            totals = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
            for plane in tl.static_range(PLANES_PER_PART):
                k = column + plane * PLANE + columns
                mask = is_row[None, :] if IS_EVEN else is_row[None, :] & (k[:, None] < in_features)
                if input_order is not None:
                    k = tl.load(input_order + expert * in_features + k, mask=k < in_features, other=0)
                values = tl.load(input_places + k[:, None], mask=mask, other=0.0)
                weights = unpack(tile, KIND, part * PLANES_PER_PART + plane, dtype)
                products = tl.dot(weights, values, products)
                if offsets is not None:
                    totals = tl.dot(ones, values, totals)
            sums += products * number_of(scale_words, part, SCALES)[:, None]
            if offsets is not None:
                sums += totals * number_of(offset_words, part, OFFSETS)[:, None]
        # Of the next block: they arrive while its codes are waited for and multiplied.
        following = tl.minimum(block + 1, num_blocks - 1)
        scale_words = load_words(scales, scale_rows, following, padded_rows, SCALES)
        offset_words = load_words(offsets, offset_rows, following, padded_rows, OFFSETS)
    activation = (slope, cubic, limit, up_shift)
    store_tile(
        sums, bias, outputs, expert, first_feature, out_features, targets, is_row, activation, IS_FIRST, HAS_GATE
    )
