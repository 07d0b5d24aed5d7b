"""Launches of linear layers on 8-bit weights and inputs, and the rows up to which the kernel is preferred."""

from __future__ import annotations

from kernels.gpu_config import Gpu, GpuGeneration, by_generation
from kernels.linear.gpu_scaled.launch_table import KERNEL_ROWS, SCALED_LINEAR
from kernels.linear.product_launch import MAX_SPLIT_ROWS, ProductLaunch, launch_for, read_launches, splits_of

_LAUNCHES = read_launches(SCALED_LINEAR)
# Up to how many rows the kernel is preferred where cuBLAS has the product too.
_KERNEL_ROWS = by_generation(KERNEL_ROWS)


def scaled_linear_launch(generation: GpuGeneration, num_rows: int) -> ProductLaunch:
    """Return the launch for a number of rows."""
    return launch_for(_LAUNCHES[generation], num_rows)


def is_kernel_preferred(generation: GpuGeneration, num_rows: int) -> bool:
    """Return True where the kernel is expected to be ahead of cuBLAS."""
    return num_rows <= _KERNEL_ROWS[generation]


def scaled_linear_splits(launch: ProductLaunch, gpu: Gpu, num_rows: int, out_features: int, in_features: int) -> int:
    """Return into how many parts the input features are divided."""
    if num_rows > MAX_SPLIT_ROWS:
        return 1
    return splits_of(launch, gpu, out_features, -(-in_features // launch.block_k), out_features * in_features)
