"""What a packed matrix is made of, and how its products are launched.

The columns of the matrix are cut into blocks, and a block into planes: 4 planes of 4-bit values, or 2 of 8-bit ones. A
word of 16 bits holds one column of each plane, the first in its lowest bits. So a tile of words becomes a tile of each
plane by the same few instructions for two neighbouring words at a time, and no value moves to another thread.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.gpu_config import Gpu, GpuGeneration, Rows, by_generation
from kernels.linear.forms import Number
from kernels.linear.gpu_packed.group_numbers import GroupLayout, GroupNumbers
from kernels.linear.product_launch import MAX_SPLIT_ROWS, ProductLaunch, launch_for, read_launches, splits_of

# By GPU generation and rows of the batch. Reasoned, not measured yet: `python -m ops.bench.gpu.tune` compares others.
FIELDS = "block_n num_warps num_stages programs_per_multiprocessor"
PACKED_LINEAR: dict[str, Rows] = {
    "HOPPER": {16: (128, 4, 4, 2), 32: (128, 4, 3, 2), 64: (128, 8, 3, 1), 128: (128, 8, 2, 1)},
    "BLACKWELL": {16: (128, 4, 4, 2), 32: (64, 4, 3, 2), 64: (64, 4, 3, 1)},
    "AMPERE": {16: (64, 4, 4, 3), 32: (64, 4, 3, 2), 64: (64, 8, 3, 2)},
    "ADA": {16: (64, 4, 3, 2), 32: (64, 4, 3, 2), 64: (64, 8, 2, 1)},
}
FUSED_ROWS: dict[str, int] = {"HOPPER": 512, "AMPERE": 256, "ADA": 256}
TILE_ROWS = 64
ROW_MULTIPLE = 256
"""Rows are padded to a multiple: the widest tile of a program."""


@dataclass(frozen=True, slots=True, eq=False)
class PackedMatrix:
    """A matrix `scale * (decoded code - centre) + offset`.

    Attributes:
        number: What codes stand for.
        words: int16, tiles that lie in memory as they are read: `[padded_rows / TILE_ROWS, num_blocks, TILE_ROWS,
            plane]`, with `num_planes * plane` columns a block. Padding stands for zero.
        scales: Of groups.
        offsets: Of groups; None where all are zero.
        group_size: Columns that share a scale, a multiple of `plane`; padded columns are in further groups.
        out_features: Rows without padding.
        in_features: Columns without padding.
        input_order: Column `j` multiplies input feature `input_order[j]`; `[in_features]` int64. None is in order.
        counters: `[padded_rows / TILE_ROWS]` int32, zero whenever no product is running; None where none is split.
    """

    number: Number
    words: torch.Tensor
    scales: GroupNumbers
    offsets: GroupNumbers | None
    group_size: int
    out_features: int
    in_features: int
    input_order: torch.Tensor | None
    counters: torch.Tensor | None

    @property
    def num_planes(self) -> int:
        """Planes of a block."""
        return num_planes(self.number)

    @property
    def plane(self) -> int:
        """Columns of a block that are in the same bits of their words."""
        return self.words.shape[-1]

    @property
    def groups(self) -> GroupLayout:
        """How the groups of columns lie."""
        return GroupLayout(self.group_size, self.plane, self.num_planes, self.num_blocks)

    @property
    def num_blocks(self) -> int:
        """Blocks that the columns are cut into."""
        return self.words.shape[-3]

    @property
    def padded_rows(self) -> int:
        """Rows with padding."""
        return self.words.shape[-4] * TILE_ROWS

    @property
    def num_bytes(self) -> int:
        """Memory that a product reads once."""
        offsets = 0 if self.offsets is None else self.offsets.words.nbytes
        return self.words.nbytes + self.scales.words.nbytes + offsets


def num_planes(number: Number) -> int:
    """Return how many codes a word holds."""
    return 16 // number.bits


_LAUNCHES = read_launches(FIELDS, PACKED_LINEAR)
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
