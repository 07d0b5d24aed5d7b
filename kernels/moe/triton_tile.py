# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""What the products with experts have in common: the rows of a block, and what becomes of a tile's sums."""

from __future__ import annotations

import triton
import triton.language as tl


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
        # Comparisons leave what is not a number as it is.
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
