"""The first part of towers: from pixels to a vector for each patch, and where the patches are.

Patches that become one token stand side by side, so projectors need not know of rows and columns. Each part of an
image's patches can be embedded by itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from gpu_worker.models.vision.parts import Linear, Runs, Transform, Turns
from gpu_worker.models.vision.weights import TowerSizes

Positions = Callable[[torch.Tensor, torch.Tensor, tuple[int, int]], torch.Tensor]
"""Learned positions, `[num_patches, size]`, of patches in a grid of these rows and columns."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the patches of an image are; those of an embedding stand side by side.

    Attributes:
        grid: Rows and columns of a tile's patches.
        rows, columns: Of each patch of a tile, `[num_patches]` int64.
        order: Of the embeddings in the order of the stream, their places in that of rows; None if that is the same.
        windows: Patches that see one another in local attention, if there is such.
    """

    grid: tuple[int, int]
    rows: torch.Tensor
    columns: torch.Tensor
    order: torch.Tensor | None = None
    windows: Sequence[Runs] = ()


@dataclass(frozen=True, slots=True)
class PatchEmbedding:
    """Makes a vector of each patch.

    Attributes:
        positions: Added to patches.
        turns: Rotations of queries and keys, in the order of a head's pairs: axis (0 rows, 1 columns) and frequencies.
        norm: Of patches.
        first: `[size]`, stands before the patches of each tile.
        frames: How many times a patch is seen, as a film that stands still.
        window: Embeddings of a side of the windows of local attention; None if there is no such.
    """

    patches: Linear
    sizes: TowerSizes
    positions: Positions | None = None
    turns: Sequence[tuple[int, torch.Tensor]] = ()
    norm: Transform | None = None
    first: torch.Tensor | None = None
    frames: int | None = None
    window: int | None = None

    def layout(self, values: torch.Tensor) -> Layout:
        """Return where the patches of `[num_tiles, height, width, 3]` are."""
        sizes, device = self.sizes, values.device
        merge = sizes.merge
        rows, columns = (side // (sizes.patch * merge) for side in values.shape[1:3])
        tokens, windows, order = torch.arange(rows * columns), list[Runs](), None
        if self.window is not None:
            tokens, windows = windows_of(rows, columns, self.window, merge**2)
            order = tokens.to(device)
        inside = torch.arange(merge**2)
        at_row = (tokens // columns)[:, None] * merge + inside // merge
        at_column = (tokens % columns)[:, None] * merge + inside % merge
        grid = rows * merge, columns * merge
        return Layout(grid, at_row.flatten().to(device), at_column.flatten().to(device), order, windows)

    def __call__(
        self, values: torch.Tensor, layout: Layout, tiles: torch.Tensor, patches: torch.Tensor
    ) -> tuple[torch.Tensor, Turns | None]:
        """Return the stream and the rotations of patches by their tile, and their place in it, `[num_patches]` each."""
        sizes, weight, size = self.sizes, self.patches.weight, self.sizes.patch
        rows, columns = layout.rows[patches], layout.columns[patches]
        whole = values[:, : layout.grid[0] * size, : layout.grid[1] * size]
        cells = whole.view(len(values), layout.grid[0], size, layout.grid[1], size, 3)[tiles, rows, :, columns]
        mean, deviation = sizes.colours.to(values.device)
        pixels = normalised(cells, mean, deviation).permute(0, 3, 1, 2)
        if self.frames is not None:
            pixels = pixels[:, :, None].expand(-1, -1, self.frames, -1, -1)
        stream = self.patches(pixels.flatten(1).to(weight.dtype))
        if self.norm is not None:
            stream = self.norm(stream)
        if self.positions is not None:
            stream = stream + self.positions(rows, columns, layout.grid).to(stream.dtype)
        if not self.turns:
            return stream, None
        places = rows, columns
        turns = torch.cat([places[axis][:, None] * each for axis, each in self.turns], 1).repeat(1, 2)
        return stream, (turns.cos(), turns.sin())


def windows_of(rows: int, columns: int, window: int, merged: int) -> tuple[torch.Tensor, list[Runs]]:
    """Divide embeddings into windows of `window` a side, those at the edges smaller.

    Return their order in which those of a window stand together, and windows of a size; and the runs of their patches,
    of which an embedding has `merged`.
    """
    places = torch.arange(rows * columns)
    at_row, at_column = places // columns // window, places % columns // window
    sizes = (rows - at_row * window).clamp(max=window) * (columns - at_column * window).clamp(max=window)
    runs, first = list[Runs](), 0
    for length, count in enumerate(sizes.bincount().tolist()):
        if not count:
            continue
        runs.append(Runs(first, length * merged, count // length))
        first += count * merged
    # By the size of windows, then window by window.
    return (sizes * len(places) + at_row * columns + at_column).argsort(stable=True), runs


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
