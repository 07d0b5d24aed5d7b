# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Product of rows with the plain matrices of their experts on a GPU.

The operands are swapped, as in `kernels.linear.gpu_scaled`: a program computes `weight[block_n] @ inputs.T` for
rows of one expert, so that the wide side of the matrix instruction is full however few these are.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.dependent_launch import wait_for_inputs
from kernels.moe.triton_tile import find_rows, store_tile


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
