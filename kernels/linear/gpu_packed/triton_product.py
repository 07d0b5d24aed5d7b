# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Linear layer on a packed matrix on a GPU, bound by reading the matrix once where rows are few.

The operands are swapped: a program computes `weight[block_n] @ inputs.T`, with weights unpacked in registers, which the
matrix instruction takes them from, and inputs in shared memory. Integers are multiplied as they are, which is exact;
the sum over a group is then scaled in float32. The sum of the inputs of a group, which its offset multiplies, is a
product with ones: it arrives in the threads that need it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.dependent_launch import dependent_launch, wait_for_inputs
from kernels.gpu_config import Gpu
from kernels.linear.gpu_packed.matrix import TILE_ROWS, PackedMatrix, packed_linear_launch, packed_linear_splits
from kernels.linear.gpu_packed.triton_unpack import load_words, number_of, unpack
from kernels.linear.product_launch import ProductLaunch
from kernels.linear.split_sums import add_splits, outputs_and_partials


@triton.jit(do_not_specialize=["num_rows", "num_blocks"])
def packed_linear_kernel(
    inputs,
    words,
    scales,
    offsets,
    bias,
    outputs,
    partials,
    counters,
    num_rows,
    out_features,
    in_features,
    num_blocks,
    input_stride,
    padded_rows,
    KIND: tl.constexpr,
    PLANE: tl.constexpr,
    NUM_PLANES: tl.constexpr,
    PLANES_PER_PART: tl.constexpr,
    SCALES: tl.constexpr,
    OFFSETS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,
    IS_EVEN: tl.constexpr,
):
    """Program (block of features, split, block of rows). `IS_EVEN`: the last block of columns is full."""
    wait_for_inputs()
    dtype: tl.constexpr = inputs.dtype.element_ty
    split = tl.program_id(1)
    local = tl.arange(0, BLOCK_N)
    features = tl.program_id(0) * BLOCK_N + local
    rows = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.arange(0, PLANE)
    tile_size = num_blocks.to(tl.int64) * TILE_ROWS * PLANE
    tile_words = (local // TILE_ROWS) * tile_size + (local % TILE_ROWS) * PLANE
    word_places = words + tl.program_id(0) * (BLOCK_N // TILE_ROWS) * tile_size + tile_words[:, None] + columns[None, :]
    # Missing rows are not read: at few rows that halves the bytes read.
    is_row = rows[None, :] < num_rows
    input_places = inputs + rows.to(tl.int64)[None, :] * input_stride + columns[:, None]
    blocks_per_split = tl.cdiv(num_blocks, SPLITS)
    first = split * blocks_per_split
    sums = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    present = tl.minimum(first, num_blocks - 1)
    scale_words = load_words(scales, features, present, padded_rows, SCALES)
    offset_words = load_words(offsets, features, present, padded_rows, OFFSETS)
    if offsets is not None:
        ones = tl.full([BLOCK_N, PLANE], 1.0, dtype=dtype)
    for block in range(first, tl.minimum(first + blocks_per_split, num_blocks)):
        tile = tl.load(word_places + block * (TILE_ROWS * PLANE), eviction_policy="evict_first")
        for part in tl.static_range(NUM_PLANES // PLANES_PER_PART):
            column = (block * NUM_PLANES + part * PLANES_PER_PART) * PLANE
            products = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
            totals = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
            for plane in tl.static_range(PLANES_PER_PART):
                k = column + plane * PLANE
                mask = is_row if IS_EVEN else is_row & (k + columns[:, None] < in_features)
                values = tl.load(input_places + k, mask=mask, other=0.0, eviction_policy="evict_last")
                weights = unpack(tile, KIND, part * PLANES_PER_PART + plane, dtype)
                products = tl.dot(weights, values, products)
                if offsets is not None:
                    totals = tl.dot(ones, values, totals)
            sums += products * number_of(scale_words, part, SCALES)[:, None]
            if offsets is not None:
                sums += totals * number_of(offset_words, part, OFFSETS)[:, None]
        # Of the next block: they arrive while its codes are waited for and multiplied.
        following = tl.minimum(block + 1, num_blocks - 1)
        scale_words = load_words(scales, features, following, padded_rows, SCALES)
        offset_words = load_words(offsets, features, following, padded_rows, OFFSETS)

    mask = is_row & (features[:, None] < out_features)
    places = rows.to(tl.int64)[None, :] * out_features + features[:, None]
    part_size = num_rows.to(tl.int64) * out_features
    sums, is_last = add_splits(sums, partials, counters + tl.program_id(0), places, mask, part_size, split, SPLITS)
    if is_last:
        if bias is not None:
            sums += tl.load(bias + features, mask=features < out_features, other=0.0).to(tl.float32)[:, None]
        tl.store(outputs + places, sums.to(outputs.dtype.element_ty), mask=mask)


def packed_linear_triton(
    inputs: torch.Tensor,
    matrix: PackedMatrix,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    gpu: Gpu,
    launch: ProductLaunch | None = None,
    num_splits: int | None = None,
) -> torch.Tensor:
    """Multiply 16-bit rows, in the order of the matrix's columns; None takes what the tables say."""
    num_rows = inputs.shape[0]
    launch = launch or packed_linear_launch(gpu.generation, num_rows)
    num_splits = num_splits or packed_linear_splits(launch, gpu, num_rows, matrix)
    outputs, partials = outputs_and_partials(
        (num_rows, matrix.out_features), out_dtype, num_splits, launch.block_m, inputs.device
    )
    num_planes = matrix.num_planes
    grid = (triton.cdiv(matrix.out_features, launch.block_n), num_splits, triton.cdiv(num_rows, launch.block_m))
    packed_linear_kernel[grid](
        inputs,
        matrix.words,
        matrix.scales.words,
        None if matrix.offsets is None else matrix.offsets.words,
        bias,
        outputs,
        partials,
        matrix.counters,
        num_rows,
        matrix.out_features,
        matrix.in_features,
        matrix.num_blocks,
        inputs.stride(0),
        matrix.padded_rows,
        KIND=matrix.number.name,
        PLANE=matrix.plane,
        NUM_PLANES=num_planes,
        PLANES_PER_PART=matrix.groups.planes_per_part,
        SCALES=matrix.scales.constants,
        OFFSETS=None if matrix.offsets is None else matrix.offsets.constants,
        TILE_ROWS=TILE_ROWS,
        BLOCK_M=launch.block_m,
        BLOCK_N=launch.block_n,
        SPLITS=num_splits,
        IS_EVEN=matrix.in_features % (num_planes * matrix.plane) == 0,
        num_warps=launch.warps_for(matrix.plane),
        **dependent_launch(inputs.device),
        num_stages=launch.num_stages,
    )
    return outputs
