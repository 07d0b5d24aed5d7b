"""How a kernel is launched that multiplies rows by a matrix, its operands swapped: tiles, warps and splits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from kernels.gpu_config import Gpu, GpuGeneration, Rows, read_table

MAX_SPLITS = 8
MIN_BLOCK_N = 64
"""Fewest output features of a program: the wide side of wgmma."""
MAX_SPLIT_ROWS = 64
"""More rows than these make tiles enough without splitting the input features."""
_COPIED_BYTES = 16
_WARP_THREADS = 32
# Of a row that no 16 bytes are copied of at once: its numbers wait in registers, which are enough for as many.
_MAX_UNALIGNED_BYTES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductLaunch:
    """The launch for up to some number of rows.

    Attributes:
        block_m: Rows of the batch that a program has, padded: the narrow side of the matrix instruction.
        block_n: Output features of a program: the wide side, 64 or more for wgmma. Inputs are read again for each such
            block, so this is large where rows are many.
        num_warps: Of a program.
        num_stages: Readings in flight.
        block_k: Input features read at once; coded weights have those of their packing.
        programs_per_multiprocessor: How many fit at once, by their shared memory.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    block_k: int = 0
    programs_per_multiprocessor: int = 1

    def for_columns(self, in_features: int, element_size: int) -> ProductLaunch:
        """Return the launch for plain rows, by their numbers and the bytes of each."""
        if in_features * element_size % _COPIED_BYTES == 0:
            return self
        return replace(self, block_k=min(self.block_k, _MAX_UNALIGNED_BYTES // element_size))

    def warps_for(self, plane: int) -> int:
        """Return the warps of a program that reads coded weights in planes of this many columns.

        No more than four where tiles of weights or inputs are too small for each thread of more to copy 16 bytes.
        """
        tile_bytes = 2 * plane * min(self.block_m, self.block_n)
        return min(self.num_warps, max(4, tile_bytes // (_COPIED_BYTES * _WARP_THREADS)))


def read_launches(fields: str, table: Mapping[str, Rows]) -> dict[GpuGeneration, list[ProductLaunch]]:
    """Return the launches of a table by generation; each serves up to as many rows as its `block_m`."""
    return {
        generation: [replace(launch, block_m=num_rows) for num_rows, launch in launches.items()]
        for generation, launches in read_table(partial(ProductLaunch, block_m=0), fields, table).items()
    }


def launch_for(launches: Sequence[ProductLaunch], num_rows: int) -> ProductLaunch:
    """Return the first launch whose programs have as many rows, or the last one, whose programs share them out."""
    return next((launch for launch in launches if num_rows <= launch.block_m), launches[-1])


def splits_of(launch: ProductLaunch, gpu: Gpu, out_features: int, num_blocks: int, weight_bytes: int) -> int:
    """Return into how many parts the input features are divided.

    It is as many for all numbers of rows of a launch, so that a row's sums do not depend on the rows beside it.
    """
    num_tiles = -(-out_features // launch.block_n)
    at_once = launch.programs_per_multiprocessor * gpu.num_multiprocessors
    part_bytes = 8 * launch.block_m * out_features
    return best_num_splits(num_tiles, at_once, num_blocks, part_bytes / weight_bytes)


def best_num_splits(num_tiles: int, at_once: int, limit: int, part_share: float) -> int:
    """Return how many programs share a tile.

    The best number fills whole waves of programs, and is so small that writing and reading the parts costs little
    beside reading the weight once.

    Args:
        num_tiles: Tiles of the result.
        at_once: Programs that the GPU runs at the same time.
        limit: Most splits there can be; no more than `MAX_SPLITS` are chosen.
        part_share: Bytes of the parts that a further split adds, over the bytes of the weight.
    """

    def efficiency(num_splits: int) -> float:
        programs = num_tiles * num_splits
        filled = programs / (-(-programs // at_once) * at_once)
        return filled / (1 + (part_share * num_splits if num_splits > 1 else 0.0))

    return max(range(1, max(1, min(limit, MAX_SPLITS)) + 1), key=efficiency)
