"""Launch shapes of linear layers on packed weights for each GPU generation, and how many rows they are for."""

from __future__ import annotations

from dataclasses import dataclass

from kernels.gpu_config import Gpu, GpuGeneration
from kernels.linear.gpu_packed.launch_table import FUSED_ROWS, PACKED_LINEAR
from kernels.linear.gpu_packed.matrix import PackedMatrix
from kernels.linear.split_k import best_num_splits

MAX_SPLIT_ROWS = 64
"""More rows than these make tiles enough without splitting the input features."""


@dataclass(frozen=True, slots=True)
class PackedLinearConfig:
    """How the kernel is launched for up to some number of rows.

    Attributes:
        block_m: Rows of the batch that a program has, padded: the narrow side of the matrix instruction.
        block_n: Output features of a program: the wide side. Inputs are read again for each such block, and are four
            times as large as 4-bit weights, so this is large where rows are many.
        num_warps: Of a program.
        num_stages: Readings in flight.
        programs_per_multiprocessor: How many fit at once, by their shared memory.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    programs_per_multiprocessor: int


_CONFIGS = {
    GpuGeneration[name]: [PackedLinearConfig(num_rows, **entry) for num_rows, entry in entries.items()]
    for name, entries in PACKED_LINEAR.items()
}
# Up to how many rows weights are unpacked by the product itself. For more, each block of rows would unpack the same
# weights once again: it is faster to write them out once as 16-bit numbers, and to leave the product to cuBLAS.
_FUSED_ROWS = {GpuGeneration[name]: rows for name, rows in FUSED_ROWS.items()}


def packed_linear_config(generation: GpuGeneration, num_rows: int) -> PackedLinearConfig:
    """Return the launch shape for a number of rows; programs have the largest block of rows beyond the table."""
    configs = _CONFIGS[generation]
    return next((config for config in configs if num_rows <= config.block_m), configs[-1])


def is_fused(generation: GpuGeneration, num_rows: int) -> bool:
    """Return True where the product unpacks the weights itself."""
    return num_rows <= _FUSED_ROWS[generation]


def splits_of(config: PackedLinearConfig, gpu: Gpu, num_rows: int, matrix: PackedMatrix) -> int:
    """Return into how many parts the blocks of columns are divided: as many for all rows of an entry."""
    if num_rows > MAX_SPLIT_ROWS:
        return 1
    num_tiles = -(-matrix.out_features // config.block_n)
    part_bytes = 8 * config.block_m * matrix.out_features
    at_once = config.programs_per_multiprocessor * gpu.num_multiprocessors
    return best_num_splits(num_tiles, at_once, matrix.num_blocks, part_bytes / matrix.num_bytes)
