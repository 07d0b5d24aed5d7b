"""A vision tower: from pixels to embeddings, some layers at a time, and some tiles.

A step of the engine may have room for a part of an image's work only. What is left is an `Encoding`, which the next
step goes on with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch

from gpu_worker.core.media import PreparedImage
from gpu_worker.models.vision.parts import Neighbourhood, VisionLayer


class EncodedImage(NamedTuple):
    """Embeddings `rows: [num_rows, hidden_size]`, and `deep` ones, added behind the model's first layers."""

    rows: torch.Tensor
    deep: tuple[torch.Tensor, ...] = ()


@dataclass(slots=True, eq=False)
class Encoding:
    """An image on its way through a tower.

    Attributes:
        stream: `[num_tiles, num_patches, size]`.
        num_passes: Of its tiles through layers: all through the first one, one by one, then through the second one.
        deep: Embeddings so far for the model's first layers.
    """

    stream: torch.Tensor
    where: Neighbourhood
    patch_grid: tuple[int, ...]
    num_passes: int = 0
    deep: list[torch.Tensor] = field(default_factory=list)


class Embed(Protocol):
    """The first part of a tower."""

    def __call__(self, values: torch.Tensor, grid: tuple[int, ...]) -> tuple[torch.Tensor, Neighbourhood]:
        """Return the stream of `[num_tiles, height, width, 3]` uint8, and where its patches are."""
        ...


class Project(Protocol):
    """From a tower's stream to embeddings."""

    def __call__(self, stream: torch.Tensor, grid: tuple[int, ...]) -> torch.Tensor:
        """Return `[num_rows, hidden_size]`."""
        ...


class VisionTower:
    """Weights on one device, used by one thread."""

    def __init__(
        self,
        embed: Embed,
        layers: Sequence[VisionLayer],
        project: Project,
        device: torch.device,
        deep: Mapping[int, Project] | None = None,
    ) -> None:
        self._embed = embed
        self._layers = layers
        self._project = project
        self._deep = deep or {}
        self._device = device

    def num_passes(self, encoding: Encoding) -> int:
        """Return how many passes encode an image."""
        return len(self._layers) * len(encoding.stream)

    def begin(self, image: PreparedImage) -> Encoding:
        """Read an image; the first layer is next."""
        values = torch.from_numpy(image.values).to(self._device)
        stream, where = self._embed(values, image.patch_grid)
        return Encoding(stream, where, image.patch_grid)

    def advance(self, encoding: Encoding, end: int) -> None:
        """Take an image's tiles through layers, until `end` passes are done."""
        num_tiles = len(encoding.stream)
        while (done := encoding.num_passes) < end:
            index, first = divmod(done, num_tiles)
            last = min(num_tiles, first + end - done)
            passed = self._layers[index](encoding.stream[first:last], encoding.where)
            if last - first == num_tiles:
                encoding.stream = passed
            else:
                encoding.stream[first:last] = passed
            if last == num_tiles and (project := self._deep.get(index)) is not None:
                encoding.deep.append(project(encoding.stream, encoding.patch_grid))
            encoding.num_passes += last - first

    def finish(self, encoding: Encoding) -> EncodedImage:
        """Return the embeddings of an image whose tiles have passed all layers."""
        assert encoding.num_passes == self.num_passes(encoding)
        return EncodedImage(self._project(encoding.stream, encoding.patch_grid), tuple(encoding.deep))
