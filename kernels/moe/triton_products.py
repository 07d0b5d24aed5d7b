# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Products of rows with the matrices of their experts on a GPU: plain ones, packed ones, and float8 by float8.

The operands are swapped, as in `kernels.linear.gpu_scaled`: a program computes `weight[block_n] @ inputs.T` for
rows of one expert, so that the wide side of the matrix instruction is full however few these are. Packed matrices are
unpacked in registers; the arithmetic is that of `kernels.linear.gpu_packed.triton_product`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.dependent_launch import wait_for_inputs
from kernels.linear.gpu_packed.triton_unpack import load_words, number_of, unpack


@triton.jit
def find_rows(
    sorted_pairs,
    row_starts,
    block_ends,
    block,
    num_experts,
    TOP_K: tl.constexpr,
    IS_FIRST: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Return the expert of a block that there is, which of its rows there are, and their rows of inputs and outputs.

    First products go from tokens to rows, second ones from rows to pairs.
    """
    places = tl.arange(0, EXPERTS)
    ends = tl.load(block_ends + places, mask=places < num_experts, other=2147483647)
    expert = tl.sum((ends <= block).to(tl.int32))
    first_block = tl.max(tl.where(ends <= block, ends, 0))
    rows = tl.load(row_starts + expert) + (block - first_block) * BLOCK_M + tl.arange(0, BLOCK_M)
    is_row = rows < tl.load(row_starts + expert + 1)
    pairs = tl.load(sorted_pairs + rows, mask=is_row, other=0)
    sources = pairs // TOP_K if IS_FIRST else rows
    targets = rows if IS_FIRST else pairs
    return expert, is_row, sources, targets


@triton.jit
def store_tile(
    sums,
    bias,
    outputs,
    expert,
    first_feature,
    out_features,
    targets,
    is_row,
    activation,
    IS_FIRST: tl.constexpr,
    HAS_GATE: tl.constexpr,
):
    """Add the bias and store the sums `[features, rows]`, those of the first product through the activation.

    Features are gates and up projections by turns; without gates they become the squares of their positive parts.

    `targets` are the rows of the outputs, `is_row` says which of them there are, and `activation` are the numbers of a
    `GatedActivation`.
    """
    BLOCK_N: tl.constexpr = sums.shape[0]
    BLOCK_M: tl.constexpr = sums.shape[1]
    slope, cubic, limit, up_shift = activation
    features = first_feature + tl.arange(0, BLOCK_N)
    if bias is not None:
        of_expert = bias + expert.to(tl.int64) * out_features
        sums += tl.load(of_expert + features, mask=features < out_features, other=0.0).to(tl.float32)[:, None]
    if HAS_GATE:
        gate, up = tl.split(tl.permute(tl.reshape(sums, [BLOCK_N // 2, 2, BLOCK_M]), [0, 2, 1]))
        # Comparisons leave NaN as it is.
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, up)
        up = tl.where(up < -limit, -limit, up)
        exponent = gate * (slope + cubic * gate * gate)
        decay = tl.exp(-tl.abs(exponent))
        results = gate * tl.where(exponent < 0, decay, 1.0) / (1.0 + decay) * (up + up_shift)
        columns = first_feature // 2 + tl.arange(0, BLOCK_N // 2)
        num_columns = out_features // 2
    else:
        results = sums
        if IS_FIRST:
            results = tl.where(sums < 0, 0.0, sums)
            results *= results
        columns = features
        num_columns = out_features
    places = targets.to(tl.int64)[None, :] * num_columns + columns[:, None]
    tl.store(
        outputs + places, results.to(outputs.dtype.element_ty), mask=is_row[None, :] & (columns[:, None] < num_columns)
    )


@triton.jit
def dense_experts_kernel(
    inputs,
    weights,
    bias,
    outputs,
    sorted_pairs,
    row_starts,
    block_ends,
    num_experts,
    out_features,
    in_features,
    input_stride,
    slope,
    cubic,
    limit,
    up_shift,
    TOP_K: tl.constexpr,
    IS_FIRST: tl.constexpr,
    HAS_GATE: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IS_EVEN: tl.constexpr,
):
    """Program (block of features, block of rows). First product: from tokens to rows; second: from rows to pairs."""
    wait_for_inputs()
    block = tl.program_id(1)
    if block >= tl.load(block_ends + num_experts - 1):
        return
    expert, is_row, sources, targets = find_rows(
        sorted_pairs, row_starts, block_ends, block, num_experts, TOP_K, IS_FIRST, EXPERTS, BLOCK_M
    )
    first_feature = tl.program_id(0) * BLOCK_N
    features = first_feature + tl.arange(0, BLOCK_N)
    columns = tl.arange(0, BLOCK_K)
    # Past the end the last feature is computed once more, and not stored: cheaper than a mask.
    weight_rows = expert.to(tl.int64) * out_features + tl.minimum(features, out_features - 1)
    weight_places = weights + weight_rows[:, None] * in_features + columns[None, :]
    input_places = inputs + sources.to(tl.int64)[None, :] * input_stride + columns[:, None]
    sums = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    for k in range(0, in_features, BLOCK_K):
        if IS_EVEN:
            tile = tl.load(weight_places + k)
            values = tl.load(input_places + k, mask=is_row[None, :], other=0.0)
        else:
            is_column = k + columns < in_features
            tile = tl.load(weight_places + k, mask=is_column[None, :], other=0.0)
            values = tl.load(input_places + k, mask=is_row[None, :] & is_column[:, None], other=0.0)
        sums = tl.dot(tile, values, sums, input_precision="ieee")
    activation = (slope, cubic, limit, up_shift)
    store_tile(
        sums, bias, outputs, expert, first_feature, out_features, targets, is_row, activation, IS_FIRST, HAS_GATE
    )


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
    """Program (block of features, block of rows). `numbers` are the bytes of the words, BLOCK_K of a row and block.

    Both sides are float8 with a scale a block. A word has the numbers of two columns, so its bytes are those of the
    first half of the columns and of the second by turns: rows are rounded into the same order.
    """
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
