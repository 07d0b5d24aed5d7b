"""Launches of linear layers on packed weights, and how many rows they are for."""

from __future__ import annotations

from kernels.gpu_config import Gpu, GpuGeneration, by_generation
from kernels.linear.gpu_packed.launch_table import FUSED_ROWS, PACKED_LINEAR
from kernels.linear.gpu_packed.matrix import PackedMatrix
from kernels.linear.product_launch import MAX_SPLIT_ROWS, ProductLaunch, launch_for, read_launches, splits_of

_LAUNCHES = read_launches(PACKED_LINEAR)
# Up to how many rows weights are unpacked by the product itself. For more, each block of rows would unpack the same
# weights once again: it is faster to write them out once as 16-bit numbers, and to leave the product to cuBLAS.
_FUSED_ROWS = by_generation(FUSED_ROWS)


def packed_linear_launch(generation: GpuGeneration, num_rows: int) -> ProductLaunch:
    """Return the launch for a number of rows."""
    return launch_for(_LAUNCHES[generation], num_rows)


def is_fused(generation: GpuGeneration, num_rows: int) -> bool:
    """Return True where the product unpacks the weights itself."""
    return num_rows <= _FUSED_ROWS[generation]


def packed_linear_splits(launch: ProductLaunch, gpu: Gpu, num_rows: int, matrix: PackedMatrix) -> int:
    """Return into how many parts the blocks of columns are divided."""
    if num_rows > MAX_SPLIT_ROWS:
        return 1
    return splits_of(launch, gpu, matrix.out_features, matrix.num_blocks, matrix.num_bytes)
