"""What a checkpoint says of how its model sees, in one form for all families."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch

from gpu_worker.core.encoder_schedule import MOST_BEGUN
from gpu_worker.core.scheduler_config import StageCost
from gpu_worker.models.config import read_activation
from gpu_worker.models.json_file import CheckpointError, JsonFile
from gpu_worker.models.rope_config import rope_fields
from gpu_worker.models.vision.embedding import PatchEmbedding
from gpu_worker.models.vision.parts import Projector, VisionLayer
from gpu_worker.models.vision.processor import ImageForm
from gpu_worker.models.vision.tower import MOST_PATCHES, VisionTower
from gpu_worker.models.vision.weights import TowerSizes, WeightTaker

MIN_KEPT_ROWS = 16_384
"""Embeddings that are kept at least: of 16 images of a million pixels."""
_FIXED_PATCHES = 16
"""Queries that take as long as reading all keys once: on CPUs, with 65,536 keys, 18."""
Colours = tuple[tuple[float, float, float], tuple[float, float, float]]
"""Mean and deviation of the pixels that a tower was trained with, from 0 to 1."""
CLIP_COLOURS: Colours = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
PLAIN_COLOURS: Colours = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))


@dataclass(frozen=True, slots=True)
class VisionFiles:
    """The configuration of a model that sees: `config.json`, its parts, the image processor's, and added tokens."""

    whole: JsonFile
    vision: JsonFile
    text: JsonFile
    processor: JsonFile
    tokens: Mapping[str, int]

    def special_token(self, text: str) -> int:
        """Return a token by its text; `CheckpointError` if the tokenizer does not have it."""
        if text not in self.tokens:
            raise CheckpointError(self.whole.path.parent / "tokenizer.json", f"has no token {text!r}")
        return self.tokens[text]


class TowerParts(Protocol):
    """Takes the weights of a family's tower, part by part."""

    @property
    def sizes(self) -> TowerSizes:
        """Of the tower."""

    def embedding(self, taker: WeightTaker) -> PatchEmbedding:
        """Take what makes vectors of patches."""

    def layer(self, taker: WeightTaker, index: int) -> VisionLayer:
        """Take a layer."""

    def projector(self, taker: WeightTaker) -> Projector:
        """Take what makes embeddings of vectors."""


@dataclass(frozen=True, slots=True)
class VisionConfig:
    """How a model sees.

    Attributes:
        form: How images are prepared.
        parts: Take the tower's weights.
        renamed, tensors: Patterns of tensors' names with replacements, and of the tower's names after that.
        num_mlp_linears: Of a layer's feed-forward block.
        rotary_axes: For each rotary pair, its axis of positions (0 text, 1 rows, 2 columns); empty for one axis.
        deep: Take what makes further embeddings behind some layers; the model's first layers get one each.
        projector_weights: For each embedding; None is one matrix.
        windows: Of layers with local attention, by their index: patches that see one another.
    """

    form: ImageForm
    parts: TowerParts
    renamed: tuple[tuple[str, str], ...]
    tensors: str
    num_mlp_linears: int = 2
    rotary_axes: tuple[int, ...] = ()
    deep: Mapping[int, Callable[[WeightTaker], Projector]] = field(default_factory=dict)
    projector_weights: int | None = None
    windows: Mapping[int, int] = field(default_factory=dict)

    def take(self, taker: WeightTaker) -> VisionTower:
        """Make the tower of its weights."""
        embedding, projector = self.parts.embedding(taker), self.parts.projector(taker)
        layers = [self.parts.layer(taker, index) for index in range(self.num_layers)]
        return VisionTower(
            embedding, layers, projector, taker.device, {index: take(taker) for index, take in self.deep.items()}
        )

    @property
    def num_layers(self) -> int:
        """Of the tower."""
        return self.parts.sizes.depth

    def stages(self, weights_per_token: int) -> tuple[StageCost, ...]:
        """Return what an embedding costs in each stage of the tower, beside a model of this size."""
        sizes = self.parts.sizes
        merged, inner = sizes.merge**2, sizes.heads * sizes.head_dim

        def cost(weights: int, pair: int = 0) -> StageCost:
            fixed_rows = -(-_FIXED_PATCHES // merged) if pair else 0
            return StageCost(weights / weights_per_token, pair / weights_per_token, fixed_rows)

        projector = cost(self.projector_weights or sizes.merged * sizes.hidden)
        stages = [cost(merged * sizes.size * 3 * sizes.patch**2)]
        for index in range(self.num_layers):
            window, pair = self.windows.get(index), 2 * inner * merged
            seen = 0 if window is None else pair * window
            stages.append(cost(merged * 3 * sizes.size * inner))
            stages.append(cost(merged * sizes.size * inner + seen, pair if window is None else 0))
            stages.append(cost(merged * self.num_mlp_linears * sizes.size * sizes.inner))
            if index in self.deep:
                stages.append(projector)
        return (*stages, projector)

    @property
    def max_rows(self) -> int:
        """Embeddings of the largest image."""
        return self.form.largest()[0]

    @property
    def max_kept_rows(self) -> int:
        """Embeddings of images that a runner keeps: of one image of each lane at least."""
        return max(MIN_KEPT_ROWS, 2 * self.max_rows)

    @property
    def working_numbers(self) -> int:
        """Numbers that images of the largest size have on their way through the tower, as many as may be begun."""
        sizes, count = self.parts.sizes, self.form.largest()[1]
        inner = sizes.heads * sizes.head_dim
        # All patches have their stream, queries, keys, values and rotations in float32; some are computed at once.
        kept = MOST_BEGUN * count * (sizes.size + 3 * inner + 4 * sizes.head_dim)
        return kept + min(count, MOST_PATCHES) * (8 * sizes.size + self.num_mlp_linears * sizes.inner)


@dataclass(frozen=True, slots=True)
class VisionFamily:
    """One family of towers: its names in `architectures`, and the reader of its configuration."""

    architectures: tuple[str, ...]
    read: Callable[[VisionFiles], VisionConfig]


def read_sizes(
    files: VisionFiles,
    merge: int,
    *,
    depth: int = 24,
    size: int = 1024,
    inner: int = 4096,
    heads: int = 16,
    patch: int = 16,
    eps: float | None = None,
    activation: tuple[str, str] = ("hidden_act", "gelu"),
    colours: Colours = CLIP_COLOURS,
) -> TowerSizes:
    """Read the sizes of a tower under the names that most have; the arguments are defaults."""
    vision = files.vision
    num_heads, size = vision.integer("num_attention_heads", heads, maximum=1024), vision.integer("hidden_size", size)
    return TowerSizes(
        vision.integer("num_hidden_layers", depth, maximum=1024),
        size,
        vision.integer("intermediate_size", inner),
        num_heads,
        size // num_heads,
        read_side(vision, "patch_size", patch),
        merge,
        files.text.integer("hidden_size"),
        eps or vision.number("layer_norm_eps", 1e-6),
        read_activation(vision, *activation),
        read_colours(files.processor, colours),
    )


def read_colours(file: JsonFile, default: Colours, *, is_normalised: bool = True) -> torch.Tensor:
    """Read the mean and deviation of training pixels, `[2, 3]` float32, from 0 to 1 if levels are divided by 255.

    `is_normalised` is what `do_normalize` is where the file does not say.
    """
    found = (file.numbers("image_mean", may_be_zero=True) or default[0], file.numbers("image_std") or default[1])
    for name, values in zip(("image_mean", "image_std"), found, strict=True):
        if len(values) != 3:
            raise file.error(name, f"has {len(values)} numbers; it must have 3, of red, green and blue")
    if not file.boolean("do_normalize", is_normalised):
        found = ((0.0,) * 3, (1.0,) * 3)
    factor = file.number("rescale_factor", 1 / 255) if file.boolean("do_rescale", True) else 1.0
    return torch.tensor(found) / (255 * factor)


def read_side(file: JsonFile, name: str, default: int) -> int:
    """Read the side of a square, which may be given as two numbers."""
    if not isinstance(file.fields.get(name), list):
        return file.integer(name, default, maximum=1 << 16)
    sides = file.integers(name)
    if len(set(sides)) != 1 or not 0 < sides[0] <= 1 << 16:
        raise file.error(name, f"is {list(sides)}; it must be the side of a square")
    return sides[0]


def read_rope_theta(file: JsonFile) -> float:
    """Read the base of a tower's rotations."""
    return rope_fields(file).optional_number("rope_theta") or file.number("rope_theta", 10000.0)
