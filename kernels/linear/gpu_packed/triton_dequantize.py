# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Writes a packed matrix out as plain numbers, its columns in the order that it has them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.linear.gpu_packed.matrix import TILE_ROWS, PackedMatrix
from kernels.linear.gpu_packed.triton_unpack import load_words, number_of, unpack

_NUM_WARPS = 4


@triton.jit
def dequantize_kernel(
    words,
    scales,
    offsets,
    outputs,
    out_features,
    in_features,
    num_blocks,
    padded_rows,
    KIND: tl.constexpr,
    PLANE: tl.constexpr,
    NUM_PLANES: tl.constexpr,
    PLANES_PER_PART: tl.constexpr,
    SCALES: tl.constexpr,
    OFFSETS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
):
    """Program (block of columns, tile of rows). Scaled in float32, and rounded once."""
    block = tl.program_id(0)
    local = tl.arange(0, TILE_ROWS)
    features = tl.program_id(1) * TILE_ROWS + local
    columns = tl.arange(0, PLANE)
    tile = (tl.program_id(1).to(tl.int64) * num_blocks + block) * (TILE_ROWS * PLANE)
    packed = tl.load(words + tile + local[:, None] * PLANE + columns[None, :])
    scale_words = load_words(scales, features, block, padded_rows, SCALES)
    offset_words = load_words(offsets, features, block, padded_rows, OFFSETS)
    for plane in tl.static_range(NUM_PLANES):
        k = (block * NUM_PLANES + plane) * PLANE
        # Every value is exact in float16.
        scale = number_of(scale_words, plane // PLANES_PER_PART, SCALES)
        numbers = unpack(packed, KIND, plane, tl.float16).to(tl.float32) * scale[:, None]
        if offsets is not None:
            numbers += number_of(offset_words, plane // PLANES_PER_PART, OFFSETS)[:, None]
        places = features.to(tl.int64)[:, None] * in_features + k + columns[None, :]
        mask = (features[:, None] < out_features) & (k + columns[None, :] < in_features)
        tl.store(outputs + places, numbers.to(outputs.dtype.element_ty), mask=mask)


def dequantize_triton(matrix: PackedMatrix, dtype: torch.dtype) -> torch.Tensor:
    """Return the matrix, `[out_features, in_features]`, rounded to a type."""
    outputs = torch.empty((matrix.out_features, matrix.in_features), dtype=dtype, device=matrix.words.device)
    dequantize_kernel[(matrix.num_blocks, triton.cdiv(matrix.out_features, TILE_ROWS))](
        matrix.words,
        matrix.scales.words,
        None if matrix.offsets is None else matrix.offsets.words,
        outputs,
        matrix.out_features,
        matrix.in_features,
        matrix.num_blocks,
        matrix.padded_rows,
        KIND=matrix.number.name,
        PLANE=matrix.plane,
        NUM_PLANES=matrix.num_planes,
        PLANES_PER_PART=matrix.groups.planes_per_part,
        SCALES=matrix.scales.constants,
        OFFSETS=None if matrix.offsets is None else matrix.offsets.constants,
        TILE_ROWS=TILE_ROWS,
        num_warps=_NUM_WARPS,
    )
    return outputs
