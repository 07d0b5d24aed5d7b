"""Pixels: resized as a model's own processor does, normalised, and cut into patches."""

from __future__ import annotations

import numpy as np
import torch
from torch.nn import functional

from gpu_worker.models.vision.processor import Pixels, Resampling


def resize(pixels: Pixels, height: int, width: int, resampling: Resampling) -> Pixels:
    """Resize `[height, width, 3]`, antialiased, rounded to 8 bits: as torchvision's `resize` does on a CPU, or Pillow.

    The result is memory of its own: a decoder's memory may be shared and reused.
    """
    if pixels.shape[:2] == (height, width):
        return pixels.copy()
    if resampling == "lanczos":
        # The filter that PyTorch does not have. Whoever decodes images has Pillow.
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


def normalised(values: torch.Tensor, mean: torch.Tensor, deviation: torch.Tensor) -> torch.Tensor:
    """Return 8-bit `values: [..., 3]` as float32 about zero; `mean` and `deviation` are `[3]`, from 0 to 1."""
    return (values.float() - mean * 255) / (deviation * 255)


def patches_of(images: torch.Tensor, size: int, merge: int = 1) -> torch.Tensor:
    """Cut `[num_tiles, height, width, 3]` into `[num_tiles, num_patches, 3, size, size]`, merged ones together."""
    tiles, height, width, _ = images.shape
    rows, columns = height // size // merge, width // size // merge
    parts = images.reshape(tiles, rows, merge, size, columns, merge, size, 3)
    return parts.permute(0, 1, 4, 2, 5, 7, 3, 6).reshape(tiles, -1, 3, size, size)


def places_of(rows: int, columns: int, merge: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the row and the column of each patch, `[num_patches]` int64, in the order of `patches_of`."""
    places = torch.arange(rows * columns).view(rows // merge, merge, columns // merge, merge)
    order = places.transpose(1, 2).flatten()
    return order // columns, order % columns
