"""The first part of towers: from pixels to a vector for each patch, and where the patches are.

Patches that become one token stand side by side, so projectors need not know of rows and columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from gpu_worker.models.vision.parts import Linear, Neighbourhood, Transform
from gpu_worker.models.vision.weights import TowerSizes

Positions = Callable[[torch.Tensor, torch.Tensor, tuple[int, int]], torch.Tensor]
"""Learned positions, `[num_patches, size]`, of patches in a grid of these rows and columns."""


@dataclass(frozen=True, slots=True)
class PatchEmbedding:
    """Makes a vector of each patch.

    Attributes:
        positions: Added to patches.
        turns: Rotations of queries and keys, in the order of a head's pairs: axis (0 rows, 1 columns) and frequencies.
        norm: Of patches.
        first: `[1, 1, size]`, stands before the patches of each tile.
        frames: How many times a patch is seen, as a film that stands still.
    """

    patches: Linear
    sizes: TowerSizes
    positions: Positions | None = None
    turns: Sequence[tuple[int, torch.Tensor]] = ()
    norm: Transform | None = None
    first: torch.Tensor | None = None
    frames: int | None = None

    def __call__(self, values: torch.Tensor) -> tuple[torch.Tensor, Neighbourhood]:
        """Return the stream of `[num_tiles, height, width, 3]` uint8, and where its patches are."""
        sizes, weight = self.sizes, self.patches.weight
        mean, deviation = sizes.colours.to(values.device)
        patches = patches_of(normalised(values, mean, deviation), sizes.patch, sizes.merge)
        if self.frames is not None:
            patches = patches[:, :, :, None].expand(-1, -1, -1, self.frames, -1, -1)
        stream = self.patches(patches.flatten(2).to(weight.dtype))
        if self.norm is not None:
            stream = self.norm(stream)
        grid = self.grid(values)
        places = [place.to(values.device) for place in places_of(*grid, sizes.merge)]
        if self.positions is not None:
            stream = stream + self.positions(places[0], places[1], grid).to(stream.dtype)
        if self.first is not None:
            stream = torch.cat((self.first.expand(len(stream), -1, -1), stream), 1)
        if not self.turns:
            return stream, Neighbourhood()
        turns = torch.cat([places[axis][:, None] * each for axis, each in self.turns], 1).repeat(1, 2)
        return stream, Neighbourhood(turns.cos(), turns.sin())

    def grid(self, values: torch.Tensor) -> tuple[int, int]:
        """Return the rows and columns of patches."""
        return values.shape[1] // self.sizes.patch, values.shape[2] // self.sizes.patch


def frequencies(size: int, theta: float, device: torch.device) -> torch.Tensor:
    """Return the frequencies of `size / 2` rotary pairs."""
    return 1.0 / theta ** (torch.arange(0, size, 2, dtype=torch.float32, device=device) / size)


def tile_positions(
    table: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor, grid: tuple[int, int]
) -> torch.Tensor:
    """Return the positions of a tile from `table: [rows * columns, size]`."""
    return table[rows * grid[1] + columns]


def axis_positions(
    table: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor, grid: tuple[int, int]
) -> torch.Tensor:
    """Return the sum of a column's and a row's position from `table: [2, num_places, size]`."""
    return table[0, columns] + table[1, rows]


def stretched_positions(
    table: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor, grid: tuple[int, int]
) -> torch.Tensor:
    """Interpolate those of a square, `table: [side * side, size]`, for a grid of any shape."""
    side = math.isqrt(len(table))
    result = torch.zeros((), device=table.device)
    taps = []
    for places, count in ((rows, grid[0]), (columns, grid[1])):
        exact = places.float() * (side - 1) / max(count - 1, 1)
        low = exact.floor()
        share = exact - low
        low = low.long()
        taps.append(((low, 1 - share), ((low + 1).clamp(max=side - 1), share)))
    for row, row_share in taps[0]:
        for column, column_share in taps[1]:
            result = result + table[row * side + column] * (row_share * column_share)[:, None]
    return result


def normalised(values: torch.Tensor, mean: torch.Tensor, deviation: torch.Tensor) -> torch.Tensor:
    """Return 8-bit `values: [..., 3]` as float32 about zero; `mean` and `deviation` are `[3]`, from 0 to 1."""
    return (values.float() - mean * 255) / (deviation * 255)


def patches_of(images: torch.Tensor, size: int, merge: int = 1) -> torch.Tensor:
    """Cut `[num_tiles, height, width, 3]` into `[num_tiles, num_patches, 3, size, size]`, merged ones together.

    Pixels at the right and at the bottom that fill no patch are left out, as a convolution does.
    """
    tiles, height, width, _ = images.shape
    rows, columns = height // size // merge, width // size // merge
    parts = images[:, : rows * merge * size, : columns * merge * size].reshape(
        tiles, rows, merge, size, columns, merge, size, 3
    )
    return parts.permute(0, 1, 4, 2, 5, 7, 3, 6).reshape(tiles, -1, 3, size, size)


def places_of(rows: int, columns: int, merge: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the row and the column of each patch, `[num_patches]` int64, in the order of `patches_of`."""
    places = torch.arange(rows * columns).view(rows // merge, merge, columns // merge, merge)
    order = places.transpose(1, 2).flatten()
    return order // columns, order % columns
