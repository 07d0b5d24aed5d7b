# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Product of rows with the packed matrices of their experts on a GPU, which are unpacked in registers.

The arithmetic is that of `kernels.linear.gpu_packed.triton_product`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.dependent_launch import wait_for_inputs
from kernels.linear.gpu_packed.triton_unpack import unpack
from kernels.moe.triton_tile import find_rows, store_tile


@triton.jit
def _load_scale(places):
    """Return scales in float32; those in a byte are exponents of two, as e8m0 has them."""
    scale = tl.load(places)
    if places.dtype.element_ty == tl.uint8:
        return (scale.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    else:
        return scale.to(tl.float32)


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
    num_groups,
    padded_rows,
    slope,
    cubic,
    limit,
    up_shift,
    KIND: tl.constexpr,
    PLANE: tl.constexpr,
    NUM_PLANES: tl.constexpr,
    PLANES_PER_SCALE: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
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
    parts = expert.to(tl.int64) * num_groups * padded_rows + first_feature + local
    input_places = inputs + sources.to(tl.int64)[None, :] * input_stride
    sums = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    if offsets is not None:
        ones = tl.full([BLOCK_N, PLANE], 1.0, dtype=dtype)
    for block in range(num_blocks):
        tile = tl.load(word_places + block * (TILE_ROWS * PLANE))
        for part in tl.static_range(NUM_PLANES // PLANES_PER_SCALE):
            column = (block * NUM_PLANES + part * PLANES_PER_SCALE) * PLANE
            group = (column // GROUP_SIZE) * padded_rows
            products = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
            totals = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
            for plane in tl.static_range(PLANES_PER_SCALE):
                k = column + plane * PLANE + columns
                mask = is_row[None, :] if IS_EVEN else is_row[None, :] & (k[:, None] < in_features)
                if input_order is not None:
                    k = tl.load(input_order + expert * in_features + k, mask=k < in_features, other=0)
                values = tl.load(input_places + k[:, None], mask=mask, other=0.0)
                weights = unpack(tile, KIND, part * PLANES_PER_SCALE + plane, dtype)
                products = tl.dot(weights, values, products)
                if offsets is not None:
                    totals = tl.dot(ones, values, totals)
            sums += products * _load_scale(scales + parts + group)[:, None]
            if offsets is not None:
                sums += totals * tl.load(offsets + parts + group)[:, None]
    activation = (slope, cubic, limit, up_shift)
    store_tile(
        sums, bias, outputs, expert, first_feature, out_features, targets, is_row, activation, IS_FIRST, HAS_GATE
    )
