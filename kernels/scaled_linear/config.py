"""Launch shapes of linear layers on 8-bit weights and inputs, and the rows up to which the kernel is preferred."""

from __future__ import annotations

from dataclasses import dataclass

from kernels.gpu_config import Gpu, GpuGeneration
from kernels.scaled_linear.launch_table import KERNEL_ROWS, SCALED_LINEAR
from kernels.split_k import best_num_splits

MAX_SPLIT_ROWS = 64
"""More rows than these make tiles enough without splitting the input features."""


@dataclass(frozen=True, slots=True)
class ScaledLinearConfig:
    """How the kernel is launched for up to some number of rows.

    Attributes:
        block_m: Rows of the batch that a program has, padded: the narrow side of the matrix instruction.
        block_n: Output features of a program: the wide side.
        block_k: Input features read at once; a block of scales where the matrix has those.
        num_warps: Of a program.
        num_stages: Readings in flight.
        programs_per_multiprocessor: How many fit at once, by their shared memory.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    programs_per_multiprocessor: int


_CONFIGS = {
    GpuGeneration[name]: [ScaledLinearConfig(num_rows, **entry) for num_rows, entry in entries.items()]
    for name, entries in SCALED_LINEAR.items()
}
# Up to how many rows the kernel is preferred where cuBLAS has the product too.
_KERNEL_ROWS = {GpuGeneration[name]: rows for name, rows in KERNEL_ROWS.items()}


def scaled_linear_config(generation: GpuGeneration, num_rows: int) -> ScaledLinearConfig:
    """Return the launch shape for a number of rows; programs have the largest block of rows beyond the table."""
    configs = _CONFIGS[generation]
    return next((config for config in configs if num_rows <= config.block_m), configs[-1])


def is_kernel_preferred(generation: GpuGeneration, num_rows: int) -> bool:
    """Return True where the kernel is expected to be ahead of cuBLAS."""
    return num_rows <= _KERNEL_ROWS[generation]


def splits_of(config: ScaledLinearConfig, gpu: Gpu, num_rows: int, out_features: int, in_features: int) -> int:
    """Return into how many parts the input features are divided: as many for all rows of an entry."""
    if num_rows > MAX_SPLIT_ROWS:
        return 1
    num_tiles = -(-out_features // config.block_n)
    at_once = config.programs_per_multiprocessor * gpu.num_multiprocessors
    limit = -(-in_features // config.block_k)
    return best_num_splits(num_tiles, at_once, limit, 8 * config.block_m / in_features)
