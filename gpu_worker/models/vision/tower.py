"""A vision tower: from pixels to embeddings in stages, some tiles at a time.

Its stages are the embedding of patches, attention and feed-forward block of each layer, and each projector. A step of
the engine may have room for a part of an image's work only. The rest is an `Encoding`, which the next step goes on
with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

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
        values: `[num_tiles, height, width, 3]` uint8.
        num_passes: Of its tiles through stages: all through the first one, one by one, then through the second one.
        stream: `[num_patches, size]` of each tile.
        outputs: Embeddings so far, and those for each of the model's first layers that get some.
    """

    values: torch.Tensor
    patch_grid: tuple[int, ...]
    num_passes: int = 0
    where: Neighbourhood = field(default_factory=Neighbourhood)
    stream: list[torch.Tensor] = field(default_factory=list)
    outputs: list[list[torch.Tensor]] = field(default_factory=list)

    def tiles(self, places: slice) -> torch.Tensor:
        """Return the stream of some tiles."""
        parts = self.stream[places]
        return parts[0][None] if len(parts) == 1 else torch.stack(parts)


Embed = Callable[[torch.Tensor], tuple[torch.Tensor, Neighbourhood]]
"""The first part of a tower: returns the stream of `[num_tiles, height, width, 3]` uint8, and where its patches are."""
Project = Callable[[torch.Tensor, tuple[int, ...]], torch.Tensor]
"""From a tower's stream, by the grid of its patches, to embeddings `[num_rows, hidden_size]`."""


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
        self._device = device
        self._num_outputs = 1
        self._stages: list[_Stage] = [partial(_embed, embed)]
        for index, layer in enumerate(layers):
            self._stages += [partial(_pass, layer.attend), partial(_pass, layer.feed_forward)]
            if deep and index in deep:
                self._stages.append(partial(_project, deep[index], self._num_outputs))
                self._num_outputs += 1
        self._stages.append(partial(_project, project, 0))

    def num_passes(self, encoding: Encoding) -> int:
        """Return how many passes encode an image."""
        return len(self._stages) * len(encoding.values)

    def begin(self, image: PreparedImage) -> Encoding:
        """Read an image; the first stage is next."""
        values = torch.from_numpy(image.values).to(self._device)
        return Encoding(values, image.patch_grid, outputs=[[] for _ in range(self._num_outputs)])

    def advance(self, encoding: Encoding, end: int) -> None:
        """Take an image's tiles through stages, until `end` passes are done."""
        num_tiles = len(encoding.values)
        while (done := encoding.num_passes) < end:
            index, first = divmod(done, num_tiles)
            last = min(num_tiles, first + end - done)
            self._stages[index](encoding, slice(first, last))
            encoding.num_passes += last - first

    def finish(self, encoding: Encoding) -> EncodedImage:
        """Return the embeddings of an image whose tiles have passed all stages."""
        assert encoding.num_passes == self.num_passes(encoding)
        rows, *deep = map(torch.cat, encoding.outputs)
        return EncodedImage(rows, tuple(deep))


_Stage = Callable[[Encoding, slice], None]
"""Takes some tiles of an image through a part of a tower."""
_Half = Callable[[torch.Tensor, Neighbourhood], torch.Tensor]
"""Of a layer: from its stream to the one behind it."""


def _embed(embed: Embed, encoding: Encoding, tiles: slice) -> None:
    stream, encoding.where = embed(encoding.values[tiles])
    encoding.stream += stream


def _pass(half: _Half, encoding: Encoding, tiles: slice) -> None:
    encoding.stream[tiles] = half(encoding.tiles(tiles), encoding.where)


def _project(project: Project, output: int, encoding: Encoding, tiles: slice) -> None:
    encoding.outputs[output].append(project(encoding.tiles(tiles), encoding.patch_grid))
