# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Product of 8-bit inputs with 8-bit weights on a GPU, scaled in float32.

The operands are swapped, as in `packed_linear`: the wide side of the matrix instruction is full of output features,
however few rows there are. Integers are summed exactly. Sums of float8 products, of which Hopper's instruction keeps
some 14 bits only, are added to float32 ones after every 128.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl

from kernels.dependent_launch import dependent_launch, wait_for_inputs
from kernels.gpu_config import Gpu
from kernels.linear.forms import SCALE_BLOCK
from kernels.linear.gpu_scaled.matrix import ScaledMatrix, scaled_linear_launch, scaled_linear_splits
from kernels.linear.product_launch import ProductLaunch
from kernels.linear.split_sums import add_splits, outputs_and_partials

# Blocks of rows whose programs run one after another for a block of features, so that both stay in the L2 cache.
_ROW_BLOCKS_TOGETHER = 8
_MAX_ROWS_WITH_BLOCKS = 64


@triton.jit(do_not_specialize=["num_rows", "input_scale_stride"])
def scaled_linear_kernel(
    inputs,
    input_scales,
    weight,
    weight_scales,
    bias,
    outputs,
    partials,
    counters,
    num_rows,
    out_features,
    in_features,
    input_scale_stride,
    weight_scale_stride,
    HAS_BLOCKS: tl.constexpr,
    SCALE_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TOGETHER: tl.constexpr,
    SPLITS: tl.constexpr,
    IS_EVEN: tl.constexpr,
):
    """Program (tile of the result, split). `IS_EVEN`: the last block of input features is full."""
    wait_for_inputs()
    num_row_blocks = tl.cdiv(num_rows, BLOCK_M)
    num_feature_blocks = tl.cdiv(out_features, BLOCK_N)
    row_block, feature_block = _tile(tl.program_id(0), num_row_blocks, num_feature_blocks, TOGETHER)
    split = tl.program_id(1)
    features = feature_block * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = row_block * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_K)
    # Past the end the last feature is computed once more, and not stored: cheaper than a mask.
    weight_rows = tl.minimum(features, out_features - 1).to(tl.int64) * in_features
    weight_places = weight + weight_rows[:, None] + columns[None, :]
    is_row = rows[None, :] < num_rows
    input_places = inputs + rows.to(tl.int64)[None, :] * in_features + columns[:, None]
    scale_row = feature_block * BLOCK_N // SCALE_BLOCK
    num_blocks = tl.cdiv(in_features, BLOCK_K)
    blocks_per_split = tl.cdiv(num_blocks, SPLITS)
    first = split * blocks_per_split
    IS_INT: tl.constexpr = weight.dtype.element_ty == tl.int8
    sums = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.int32 if IS_INT else tl.float32)
    for block in range(first, tl.minimum(first + blocks_per_split, num_blocks)):
        k = block * BLOCK_K
        if IS_EVEN:
            weights = tl.load(weight_places + k)
            values = tl.load(input_places + k, mask=is_row, other=0.0)
        else:
            is_column = k + columns < in_features
            weights = tl.load(weight_places + k, mask=is_column[None, :], other=0.0)
            values = tl.load(input_places + k, mask=is_row & is_column[:, None], other=0.0)
        if HAS_BLOCKS:
            scale_column = k // SCALE_BLOCK
            weight_scale = tl.load(weight_scales + scale_row * weight_scale_stride + scale_column)
            places = input_scales + scale_column.to(tl.int64) * input_scale_stride + rows
            scale = tl.load(places, mask=rows < num_rows, other=0.0)
            products = tl.dot(weights, values)
            sums += products * (scale * weight_scale)[None, :]
        elif IS_INT:
            sums = tl.dot(weights, values, sums, out_dtype=tl.int32)
        else:
            sums = tl.dot(weights, values, sums, max_num_imprecise_acc=min(BLOCK_K, 128))
    if not HAS_BLOCKS:
        scale = tl.load(input_scales + rows, mask=rows < num_rows, other=0.0)
        weight_scale = tl.load(weight_scales + features, mask=features < out_features, other=0.0)
        sums = sums.to(tl.float32) * scale[None, :] * weight_scale[:, None]

    mask = is_row & (features[:, None] < out_features)
    places = rows.to(tl.int64)[None, :] * out_features + features[:, None]
    part_size = num_rows.to(tl.int64) * out_features
    sums, is_last = add_splits(sums, partials, counters + feature_block, places, mask, part_size, split, SPLITS)
    if is_last:
        if bias is not None:
            sums += tl.load(bias + features, mask=features < out_features, other=0.0).to(tl.float32)[:, None]
        tl.store(outputs + places, sums.to(outputs.dtype.element_ty), mask=mask)


@triton.jit
def _tile(program, num_row_blocks, num_feature_blocks, TOGETHER: tl.constexpr):
    programs_together = TOGETHER * num_feature_blocks
    first = program // programs_together * TOGETHER
    together = tl.minimum(num_row_blocks - first, TOGETHER)
    local = program % programs_together
    return first + local % together, local // together


def scaled_linear_triton(
    inputs: torch.Tensor,
    input_scales: torch.Tensor,
    matrix: ScaledMatrix,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    gpu: Gpu,
    launch: ProductLaunch | None = None,
    num_splits: int | None = None,
) -> torch.Tensor:
    """Multiply quantized rows; None takes what the tables say."""
    num_rows, in_features = inputs.shape
    out_features = matrix.values.shape[0]
    launch = launch or scaled_linear_launch(gpu.generation, num_rows).for_columns(in_features, 1)
    if matrix.has_blocks:
        # Products of each block are scaled one by one: twice the sums, and the scales, have to fit into registers.
        launch = replace(launch, block_k=SCALE_BLOCK, block_m=min(launch.block_m, _MAX_ROWS_WITH_BLOCKS))
    num_splits = num_splits or scaled_linear_splits(launch, gpu, num_rows, out_features, in_features)
    outputs, partials = outputs_and_partials(
        (num_rows, out_features), out_dtype, num_splits, launch.block_m, inputs.device
    )
    num_tiles = triton.cdiv(out_features, launch.block_n) * triton.cdiv(num_rows, launch.block_m)
    scaled_linear_kernel[(num_tiles, num_splits)](
        inputs,
        input_scales,
        matrix.values,
        matrix.scales,
        bias,
        outputs,
        partials,
        matrix.counters,
        num_rows,
        out_features,
        in_features,
        input_scales.stride(1),
        matrix.scales.shape[-1],
        HAS_BLOCKS=matrix.has_blocks,
        SCALE_BLOCK=SCALE_BLOCK,
        BLOCK_M=launch.block_m,
        BLOCK_N=launch.block_n,
        BLOCK_K=launch.block_k,
        TOGETHER=_ROW_BLOCKS_TOGETHER,
        SPLITS=num_splits,
        IS_EVEN=in_features % launch.block_k == 0,
        num_warps=launch.num_warps,
        **dependent_launch(inputs.device),
        num_stages=launch.num_stages,
    )
    return outputs
