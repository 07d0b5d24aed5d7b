"""How a kernel is launched that multiplies few rows by a matrix, its operands swapped: tiles, warps and splits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kernels.gpu_config import Gpu, GpuGeneration
from kernels.linear.split_k import best_num_splits


@dataclass(frozen=True, slots=True)
class ProductLaunch:
    """The launch for up to some number of rows.

    Attributes:
        block_m: Rows of the batch that a program has, padded: the narrow side of the matrix instruction.
        block_n: Output features of a program: the wide side, 64 or more for wgmma.
        block_k: Input features read at once.
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


def read_launches(table: Mapping[str, Mapping[int, Mapping[str, int]]]) -> dict[GpuGeneration, list[ProductLaunch]]:
    """Return the launches of a table, by GPU generation, those for few rows first."""
    return {
        GpuGeneration[name]: [ProductLaunch(num_rows, **entry) for num_rows, entry in entries.items()]
        for name, entries in table.items()
    }


def splits_of(launch: ProductLaunch, gpu: Gpu, out_features: int, in_features: int, weight_bytes: int) -> int:
    """Return into how many parts the input features are divided.

    It is as many for all numbers of rows of a launch, so that a row's sums do not depend on the rows beside it.

    Args:
        launch: Of the kernel.
        gpu: To fill.
        out_features: Of the matrix.
        in_features: Likewise.
        weight_bytes: Of an element of the matrix.
    """
    num_tiles = -(-out_features // launch.block_n)
    at_once = launch.programs_per_multiprocessor * gpu.num_multiprocessors
    limit = -(-in_features // launch.block_k)
    return best_num_splits(num_tiles, at_once, limit, 8 * launch.block_m / (weight_bytes * in_features))
