"""What a checkpoint says of how its model sees, in one form for all families."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from gpu_worker.models.errors import CheckpointError
from gpu_worker.models.json_file import JsonFile
from gpu_worker.models.rope_config import rope_fields
from gpu_worker.models.vision.parts import WeightTaker
from gpu_worker.models.vision.processor import ImageForm
from gpu_worker.models.vision.tower import VisionTower

MIN_KEPT_ROWS = 16_384
"""Embeddings that are kept at least: of 16 images of a million pixels."""
LOW_DETAIL_SIDE = 512
"""Pixels of an image's side at low detail, about so."""
CLIP_COLOURS = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
"""Mean and deviation of the pixels that many towers were trained with."""


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


@dataclass(frozen=True, slots=True)
class VisionConfig:
    """How a model sees.

    Attributes:
        image_token: The prompt's token whose embedding is replaced.
        size: Of the tower's stream.
        layer_weights: Of a layer of the tower.
        max_rows, max_patches: Of the largest image.
        take: Makes the tower of its weights, on a device.
        renamed, tensors: Patterns of tensors' names with replacements, and of the tower's names after that.
        rotary_axes: For each rotary pair, its axis of positions (0 text, 1 rows, 2 columns); empty for one axis.
        num_deep: Layers of the model that get further embeddings.
    """

    form: ImageForm
    image_token: int
    num_layers: int
    size: int
    layer_weights: int
    max_rows: int
    max_patches: int
    take: Callable[[WeightTaker, torch.device], VisionTower]
    renamed: tuple[tuple[str, str], ...]
    tensors: str
    rotary_axes: tuple[int, ...] = ()
    num_deep: int = 0

    @property
    def max_kept_rows(self) -> int:
        """Embeddings of images that a runner keeps."""
        return max(MIN_KEPT_ROWS, self.max_rows)

    @property
    def patch_numbers(self) -> int:
        """Numbers that a patch has on its way through a layer, about so."""
        return 8 * self.size + self.layer_weights // self.size


@dataclass(frozen=True, slots=True)
class VisionFamily:
    """One family of towers: its names in `architectures`, and the reader of its configuration."""

    architectures: tuple[str, ...]
    read: Callable[[VisionFiles], VisionConfig]


def read_colours(file: JsonFile, mean: tuple[float, ...], deviation: tuple[float, ...]) -> torch.Tensor:
    """Read the mean and deviation of training pixels, `[2, 3]` float32; the arguments are defaults."""
    found = (file.numbers("image_mean") or mean, file.numbers("image_std") or deviation)
    for name, values in zip(("image_mean", "image_std"), found, strict=True):
        if len(values) != 3:
            raise file.error(name, f"has {len(values)} numbers; it must have 3, of red, green and blue")
    return torch.tensor(found)


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
