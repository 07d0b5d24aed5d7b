"""A vision tower: from pixels to embeddings in stages, some patches at a time.

Its stages are the embedding of patches; queries, keys and values, attention, and the feed-forward block of each layer;
and each projector. A step of the engine may have room for a part of a stage only, the patches of some embeddings. The
rest is an `Encoding`, which the next step goes on with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch

from gpu_worker.core.media import PreparedImage
from gpu_worker.models.vision.embedding import Layout, PatchEmbedding
from gpu_worker.models.vision.parts import Heads, Projector, Runs, Turns, VisionLayer

MOST_PATCHES = 2048
"""That pass a stage at once: more need memory and are no faster."""


class EncodedImage(NamedTuple):
    """Embeddings `rows: [num_rows, hidden_size]`, and `deep` ones, added behind the model's first layers."""

    rows: torch.Tensor
    deep: tuple[torch.Tensor, ...] = ()


@dataclass(slots=True, eq=False)
class Encoding:
    """An image on its way through a tower.

    Attributes:
        values: `[num_tiles, height, width, 3]` uint8.
        num_rows: Embeddings that are made of it.
        merged: Patches of each.
        num_passes: Of embeddings through stages: all through the first one, then through the second one.
        stream: `[num_patches, size]`, of one tile behind the other; a tile may begin with a vector that is no patch.
        turns, heads: Of these patches.
        outputs: Embeddings so far, and those for each of the model's first layers that get some.
    """

    values: torch.Tensor
    layout: Layout
    num_rows: int
    merged: int
    stream: torch.Tensor
    num_passes: int = 0
    turns: Turns | None = None
    heads: Heads | None = None
    outputs: list[torch.Tensor] = field(default_factory=list)

    @property
    def rows_per_tile(self) -> int:
        """Embeddings of a tile."""
        return self.num_rows // len(self.values)

    @property
    def tile_size(self) -> int:
        """Vectors of a tile in the stream."""
        return len(self.stream) // len(self.values)

    def patches(self, rows: range) -> slice:
        """Return the vectors of the stream that some embeddings are made of, first ones of tiles included."""
        return slice(*(self._place(row) for row in (rows.start, rows.stop)))

    def _place(self, row: int) -> int:
        tile, inside = divmod(row, self.rows_per_tile)
        others = self.tile_size - self.rows_per_tile * self.merged if inside else 0
        return tile * self.tile_size + others + inside * self.merged

    def in_tiles(self, rows: range) -> Iterator[tuple[range, slice]]:
        """Divide embeddings into those whose patches stand side by side: yield them and these patches."""
        has_first = self.tile_size > self.rows_per_tile * self.merged
        start = rows.start
        while start < rows.stop:
            stop = rows.stop
            if has_first:
                stop = min(stop, start - start % self.rows_per_tile + self.rows_per_tile)
            end = self.patches(range(start, stop)).stop
            yield range(start, stop), slice(end - (stop - start) * self.merged, end)
            start = stop


class VisionTower:
    """Weights on one device, used by one thread."""

    def __init__(
        self,
        embedding: PatchEmbedding,
        layers: Sequence[VisionLayer],
        projector: Projector,
        device: torch.device,
        deep: Mapping[int, Projector] | None = None,
    ) -> None:
        self._device = device
        self._embedding = embedding
        self._num_outputs = 1
        self._stages: list[_Stage] = [partial(_embed, embedding)]
        for index, layer in enumerate(layers):
            self._stages += [partial(part, layer) for part in (_take_heads, _attend, _feed_forward)]
            if deep and index in deep:
                self._stages.append(partial(_project, deep[index], self._num_outputs))
                self._num_outputs += 1
        self._stages.append(partial(_project, projector, 0))

    @property
    def num_stages(self) -> int:
        """Stages that each embedding's patches pass."""
        return len(self._stages)

    def num_passes(self, encoding: Encoding) -> int:
        """Return how many passes encode an image."""
        return self.num_stages * encoding.num_rows

    def begin(self, image: PreparedImage) -> Encoding:
        """Read an image; the first stage is next."""
        values = torch.from_numpy(image.values).to(self._device)
        layout, embedding = self._embedding.layout(values), self._embedding
        first, weight = embedding.first, embedding.patches.weight
        tile_size = len(layout.rows) + (first is not None)
        stream = weight.new_empty(len(values), tile_size, len(weight))
        if first is not None:
            stream[:, 0] = first
        outputs = [weight.new_empty(0) for _ in range(self._num_outputs)]
        merged = embedding.sizes.merge**2
        return Encoding(values, layout, image.num_rows, merged, stream.flatten(0, 1), outputs=outputs)

    def advance(self, encoding: Encoding, end: int) -> None:
        """Take an image's embeddings through stages, until `end` passes are done."""
        most = max(1, MOST_PATCHES // encoding.merged)
        while (done := encoding.num_passes) < end:
            stage, first = divmod(done, encoding.num_rows)
            last = min(encoding.num_rows, first + min(most, end - done))
            self._stages[stage](encoding, range(first, last))
            encoding.num_passes += last - first

    def finish(self, encoding: Encoding) -> EncodedImage:
        """Return the embeddings of an image that has passed all stages."""
        assert encoding.num_passes == self.num_passes(encoding)
        rows, *deep = encoding.outputs
        return EncodedImage(rows, tuple(deep))


_Stage = Callable[[Encoding, range], None]
"""Takes the patches of some embeddings through a part of a tower."""


def _embed(embedding: PatchEmbedding, encoding: Encoding, rows: range) -> None:
    size = len(encoding.layout.rows)
    for part, patches in encoding.in_tiles(rows):
        places = torch.arange(part.start * encoding.merged, part.stop * encoding.merged, device=encoding.values.device)
        stream, turns = embedding(encoding.values, encoding.layout, places // size, places % size)
        encoding.stream[patches] = stream
        if turns is not None:
            if encoding.turns is None:
                encoding.turns = _whole(turns[0], encoding), _whole(turns[1], encoding)
            for whole, each in zip(encoding.turns, turns, strict=True):
                whole[patches] = each


def _take_heads(layer: VisionLayer, encoding: Encoding, rows: range) -> None:
    patches = encoding.patches(rows)
    turns = None if encoding.turns is None else (encoding.turns[0][patches], encoding.turns[1][patches])
    heads = layer.heads(encoding.stream[patches], turns)
    if encoding.heads is None:
        shape = len(heads.query), len(encoding.stream), heads.query.shape[2]
        encoding.heads = Heads(*(heads.query.new_empty(shape) for _ in range(3)))
    encoding.heads.query[:, patches], encoding.heads.key[:, patches] = heads.query, heads.key
    encoding.heads.value[:, patches] = heads.value


def _attend(layer: VisionLayer, encoding: Encoding, rows: range) -> None:
    assert encoding.heads is not None, "queries are a stage before"
    patches, runs = encoding.patches(rows), encoding.layout.windows
    if not layer.attention.is_local or not runs:
        runs = [Runs(0, encoding.tile_size, len(encoding.values))]
    encoding.stream[patches] = layer.attend(encoding.stream[patches], encoding.heads, patches, runs)


def _feed_forward(layer: VisionLayer, encoding: Encoding, rows: range) -> None:
    patches = encoding.patches(rows)
    encoding.stream[patches] = layer.feed_forward(encoding.stream[patches])


def _project(projector: Projector, output: int, encoding: Encoding, rows: range) -> None:
    order = encoding.layout.order
    for part, patches in encoding.in_tiles(rows):
        embeddings = projector(encoding.stream[patches])
        if not len(encoding.outputs[output]):
            encoding.outputs[output] = embeddings.new_empty(encoding.num_rows, embeddings.shape[1])
        places = slice(part.start, part.stop)
        encoding.outputs[output][places if order is None else order[places]] = embeddings


def _whole(part: torch.Tensor, encoding: Encoding) -> torch.Tensor:
    """Return room for what `part` has of some patches, of all of them."""
    return part.new_empty(len(encoding.stream), *part.shape[1:])
