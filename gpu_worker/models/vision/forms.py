"""How families read images: in what size, cut into which tiles, and as which tokens of the prompt."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional

from gpu_worker.models.vision.processor import ImageForm, ImagePlan, Pixels, Resampling
from shared.errors import BadRequestError
from shared.media import Detail

LOW_DETAIL_SIDE = 512
"""Pixels of an image's side at low detail, about so."""
_LOW_DETAIL_TOKENS = 70
MAX_ASPECT = 200


@dataclass(frozen=True, slots=True)
class SquareForm(ImageForm):
    """Images of one size, whatever their shape; `begin`, which templates write, and `end` stand around their tokens."""

    resampling = "bilinear"

    begin: int
    end: int
    side: int
    num_rows: int
    num_patches: int

    @property
    def placeholder(self) -> int:
        """See `ImageForm`."""
        return self.begin

    def plan(self, width: int, height: int, detail: Detail) -> ImagePlan:
        """See `ImageForm`."""
        token_ids = [self.begin, *([self.token] * self.num_rows), self.end]
        tile_size = (self.side, self.side)
        return ImagePlan(token_ids, (1, 1 + self.num_rows), self.num_rows, (1, 1), tile_size, self.num_patches)

    def resized(self, pixels: Pixels, plan: ImagePlan) -> Pixels:
        """See `ImageForm`."""
        return resize(pixels, *plan.tile_size, self.resampling)[None]

    def largest(self) -> tuple[int, int]:
        """See `ImageForm`."""
        return self.num_rows, self.num_patches


@dataclass(frozen=True, slots=True)
class _ShapedForm(ImageForm):
    """Images that keep their shape, about so: a token is made of `merge` patches in rows and columns."""

    patch: int
    merge: int

    @property
    def unit(self) -> int:
        """Pixels of a token's side."""
        return self.patch * self.merge

    def resized(self, pixels: Pixels, plan: ImagePlan) -> Pixels:
        """See `ImageForm`."""
        return resize(pixels, *plan.tile_size, self.resampling)[None]

    def _plan(
        self, rows: int, columns: int, token_ids: list[int], before: int = 0, after: int = 0, *, has_axes: bool = False
    ) -> ImagePlan:
        """Plan an image of `rows` and `columns` of tokens; some tokens before and after do not belong to it."""
        count, grid = rows * columns, (rows * self.merge, columns * self.merge)
        size, axes = (rows * self.unit, columns * self.unit), (rows, columns) if has_axes else ()
        return ImagePlan(token_ids, (before, len(token_ids) - after), count, grid, size, count * self.merge**2, axes)


@dataclass(frozen=True, slots=True)
class DynamicForm(_ShapedForm):
    """Images of any shape, of which the tower reads from `min_pixels` to `max_pixels`; positions have axes."""

    min_pixels: int
    max_pixels: int

    def plan(self, width: int, height: int, detail: Detail) -> ImagePlan:
        """See `ImageForm`."""
        if max(width, height) > MAX_ASPECT * min(width, height):
            problem = f"An image has {width}x{height} pixels; one side may be {MAX_ASPECT} times the other at most."
            raise BadRequestError(problem, "messages")
        most = max(self.min_pixels, min(self.max_pixels, LOW_DETAIL_SIDE**2)) if detail == "low" else self.max_pixels
        rows, columns = (side // self.unit for side in _fitted(height, width, self.unit, self.min_pixels, most))
        return self._plan(rows, columns, [self.token] * (rows * columns), has_axes=True)

    def largest(self) -> tuple[int, int]:
        """See `ImageForm`."""
        most = self.max_pixels // self.patch**2
        return most // self.merge**2, most


def _fitted(height: int, width: int, unit: int, least: int, most: int) -> tuple[int, int]:
    """Return the height and width nearest to an image's that are multiples of `unit` and within bounds of pixels."""
    rows, columns = round(height / unit) * unit, round(width / unit) * unit
    if rows * columns > most:
        shrink = math.sqrt(height * width / most)
        rows = max(unit, math.floor(height / shrink / unit) * unit)
        columns = max(unit, math.floor(width / shrink / unit) * unit)
    elif rows * columns < least:
        grow = math.sqrt(least / (height * width))
        rows, columns = (math.ceil(side * grow / unit) * unit for side in (height, width))
    return rows, columns


@dataclass(frozen=True, slots=True)
class RowsForm(_ShapedForm):
    """Images whose rows end with a token of their own; no side is longer than `max_side` pixels."""

    row_end: int
    image_end: int
    max_side: int

    def plan(self, width: int, height: int, detail: Detail) -> ImagePlan:
        """See `ImageForm`."""
        most = min(self.max_side, LOW_DETAIL_SIDE) if detail == "low" else self.max_side
        shrink = max(height / most, width / most, 1)
        rows, columns = (max(1, -(-math.floor(side / shrink) // self.unit)) for side in (height, width))
        token_ids = [*([self.token] * columns), self.row_end] * rows
        token_ids[-1] = self.image_end
        return self._plan(rows, columns, token_ids)

    def largest(self) -> tuple[int, int]:
        """See `ImageForm`."""
        most = -(-self.max_side // self.unit)
        return most**2, (most * self.merge) ** 2


@dataclass(frozen=True, slots=True)
class PooledForm(_ShapedForm):
    """Images of at most `max_tokens` tokens, enlarged to as many; `begin` and `end` stand around them."""

    begin: int
    end: int
    max_tokens: int

    def plan(self, width: int, height: int, detail: Detail) -> ImagePlan:
        """See `ImageForm`."""
        most = min(self.max_tokens, _LOW_DETAIL_TOKENS) if detail == "low" else self.max_tokens
        grow = math.sqrt(most * self.unit**2 / (width * height))
        rows, columns = (math.floor(grow * side / self.unit) for side in (height, width))
        if not rows:
            rows, columns = 1, min(width // height, most)
        elif not columns:
            rows, columns = min(height // width, most), 1
        return self._plan(rows, columns, [self.begin, *([self.token] * (rows * columns)), self.end], 1, 1)

    def largest(self) -> tuple[int, int]:
        """See `ImageForm`."""
        return self.max_tokens, self.max_tokens * self.merge**2


@dataclass(frozen=True, slots=True)
class _TiledForm(ImageForm):
    """Images cut into square tiles of `side` pixels, and seen once more as a whole behind these."""

    side: int
    tokens_per_tile: int
    patches_per_tile: int

    def _tiles(self, pixels: Pixels, rows: int, columns: int) -> Pixels:
        """Return the tiles of an image, and the whole; that alone without tiles."""
        side = self.side
        whole = resize(pixels, side, side, self.resampling)[None]
        if rows * columns <= 1:
            return whole
        return np.concatenate((cut(resize(pixels, rows * side, columns * side, self.resampling), side), whole))

    def _plan(self, grid: tuple[int, int], num_tiles: int, token_ids: list[int], around: int) -> ImagePlan:
        """Plan an image; `around` tokens before and after it do not belong to it."""
        num_rows, num_patches = num_tiles * self.tokens_per_tile, num_tiles * self.patches_per_tile
        span = (around, len(token_ids) - around)
        return ImagePlan(token_ids, span, num_rows, grid, (self.side, self.side), num_patches, num_tiles=num_tiles)


@dataclass(frozen=True, slots=True)
class TilesForm(_TiledForm):
    """Images of the grid of tiles whose shape is nearest, between the tokens `begin` and `end`.

    `min_tiles` and `max_tiles` do not count the picture of the whole.
    """

    begin: int
    end: int
    min_tiles: int
    max_tiles: int

    def plan(self, width: int, height: int, detail: Detail) -> ImagePlan:
        """See `ImageForm`."""
        rows, columns = (1, 1) if detail == "low" else self._grid(width, height)
        count = rows * columns + (rows * columns > 1)
        token_ids = [self.begin, *([self.token] * (count * self.tokens_per_tile)), self.end]
        return self._plan((rows, columns), count, token_ids, 1)

    def resized(self, pixels: Pixels, plan: ImagePlan) -> Pixels:
        """See `ImageForm`."""
        rows, columns = plan.patch_grid
        return self._tiles(pixels, rows, columns)

    def largest(self) -> tuple[int, int]:
        """See `ImageForm`."""
        count = self.max_tiles + (self.max_tiles > 1)
        return count * self.tokens_per_tile, count * self.patches_per_tile

    def _grid(self, width: int, height: int) -> tuple[int, int]:
        """Return the rows and columns whose shape is nearest; of equal shapes the finest that is not much too fine."""
        sides = range(1, self.max_tiles + 1)
        grids = [(r, c) for c in sides for r in sides if self.min_tiles <= r * c <= self.max_tiles]
        best, least = (1, 1), float("inf")
        for rows, columns in sorted(grids, key=lambda grid: grid[0] * grid[1]):
            difference = abs(width / height - columns / rows)
            is_filled = width * height > 0.5 * self.side**2 * rows * columns
            if difference < least or (difference == least and is_filled):
                best, least = (rows, columns), difference
        return best


@dataclass(frozen=True, slots=True)
class CutForm(_TiledForm):
    """Images whose longer side becomes `longest` pixels, in as many tiles as hold them.

    Attributes:
        boundary: The token before each tile, and behind the last.
        whole: Says that the whole image follows.
        places: Say that the tile of a row and a column follows, `[row][column]`; empty where images are not cut.
        row_end, last_row_end: What stands behind a row of tiles.
    """

    resampling = "lanczos"

    boundary: int
    whole: int
    places: tuple[tuple[int, ...], ...]
    row_end: tuple[int, ...]
    last_row_end: tuple[int, ...]
    longest: int

    def plan(self, width: int, height: int, detail: Detail) -> ImagePlan:
        """See `ImageForm`."""
        rows, columns = self._grid(width, height) if self.places and detail != "low" else (0, 0)
        tile, token_ids = [self.token] * self.tokens_per_tile, list[int]()
        for row in range(rows):
            for place in self.places[row][:columns]:
                token_ids += (self.boundary, place, *tile)
            token_ids += self.row_end if row < rows - 1 else self.last_row_end
        token_ids += (self.boundary, self.whole, *tile, self.boundary)
        return self._plan((rows, columns), rows * columns + 1, token_ids, 0)

    def resized(self, pixels: Pixels, plan: ImagePlan) -> Pixels:
        """See `ImageForm`."""
        (rows, columns), side = plan.patch_grid, self.side
        large = resize(pixels, *self._enlarged(pixels.shape[1], pixels.shape[0]), self.resampling)
        # The whole is made of the image in the size of its tiles.
        tiled = resize(large, rows * side, columns * side, self.resampling) if rows else large
        return self._tiles(tiled, rows, columns)

    def largest(self) -> tuple[int, int]:
        """See `ImageForm`."""
        count = 1 + max(1, len(self.places)) ** 2
        return count * self.tokens_per_tile, count * self.patches_per_tile

    def _enlarged(self, width: int, height: int) -> tuple[int, int]:
        """Return the height and width of an image whose longer side has become `longest`; the other one is even."""
        ratio, longest = width / height, self.longest
        if width >= height:
            height, width = int(longest / ratio), longest
            height += height % 2
        else:
            height, width = longest, int(longest * ratio)
            width += width % 2
        return max(height, 1), max(width, 1)

    def _grid(self, width: int, height: int) -> tuple[int, int]:
        """Return how many rows and columns of tiles hold the enlarged image; none if one does."""
        height, width = self._enlarged(width, height)
        ratio, side = width / height, self.side
        if width >= height:
            columns = math.ceil(width / side)
            rows = math.ceil(int(columns * side / ratio) / side)
        else:
            rows = math.ceil(height / side)
            columns = math.ceil(int(rows * side * ratio) / side)
        return (rows, columns) if rows * columns > 1 else (0, 0)


def resize(pixels: Pixels, height: int, width: int, resampling: Resampling) -> Pixels:
    """Resize `[height, width, 3]`, antialiased, rounded to 8 bits: as torchvision's `resize` does on a CPU, or Pillow.

    The result is memory of its own: a decoder's memory may be shared and reused.
    """
    if pixels.shape[:2] == (height, width):
        return pixels.copy()
    if resampling == "lanczos":
        # PyTorch lacks this filter; Pillow is there wherever images are decoded.
        from PIL import Image

        return np.array(Image.fromarray(pixels).resize((width, height), Image.Resampling.LANCZOS))
    image = torch.from_numpy(np.require(pixels, requirements=["C", "W"])).permute(2, 0, 1)[None]
    resized = functional.interpolate(image, (height, width), mode=resampling, antialias=True, align_corners=False)
    result: Pixels = resized[0].permute(1, 2, 0).contiguous().numpy()
    return result


def cut(pixels: Pixels, side: int) -> Pixels:
    """Cut `[height, width, 3]` into squares, row by row: `[num_tiles, side, side, 3]`."""
    height, width, _ = pixels.shape
    tiles = pixels.reshape(height // side, side, width // side, side, 3).transpose(0, 2, 1, 3, 4)
    return np.ascontiguousarray(tiles.reshape(-1, side, side, 3))
