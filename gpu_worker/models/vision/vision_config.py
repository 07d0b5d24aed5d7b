"""What a checkpoint says of how its model sees, in one form for all families."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from gpu_worker.models.json_file import JsonFile
from gpu_worker.models.vision.parts import WeightTaker
from gpu_worker.models.vision.processor import ImageForm
from gpu_worker.models.vision.tower import VisionTower

MIN_KEPT_ROWS = 16_384
"""Embeddings that are kept at least: of 16 images of a million pixels."""


@dataclass(frozen=True, slots=True)
class VisionFiles:
    """The configuration of a model that sees.

    Attributes:
        whole: `config.json`.
        vision: Its part for the tower.
        text: Its part for text.
        processor: Of its image processor; empty where the directory has none.
    """

    whole: JsonFile
    vision: JsonFile
    text: JsonFile
    processor: JsonFile


@dataclass(frozen=True, slots=True)
class VisionConfig:
    """How a model sees.

    Attributes:
        form: How images are read.
        image_token: The prompt's token whose embedding is replaced.
        num_layers: Of the tower.
        size: Of the tower's stream.
        layer_weights: Of a layer of the tower.
        max_rows: Embeddings of the largest image.
        max_patches: Its patches.
        take: Makes the tower of its weights, on a device.
        renamed: Patterns of tensors' names, and what they are replaced by.
        tensors: Pattern of the names that the tower's tensors have then.
        axes: For each pair of dimensions that turns, the axis of positions (0 is that of text, 1 rows, 2 columns) that
            it turns by; empty where positions have one axis.
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
    axes: tuple[int, ...] = ()
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
    """One family of towers.

    Attributes:
        architectures: Their names in the `architectures` of checkpoints.
        read: Reads the configuration.
    """

    architectures: tuple[str, ...]
    read: Callable[[VisionFiles], VisionConfig]


def read_colours(file: JsonFile, mean: tuple[float, ...], deviation: tuple[float, ...]) -> torch.Tensor:
    """Read the mean and the deviation of the pixels that a tower was trained with, `[2, 3]` float32.

    Args:
        file: Of the processor.
        mean: What an absent `image_mean` means.
        deviation: The same of `image_std`.

    Raises:
        CheckpointError: A list has not three numbers.
    """
    found = (file.numbers("image_mean") or mean, file.numbers("image_std") or deviation)
    for name, values in zip(("image_mean", "image_std"), found, strict=True):
        if len(values) != 3:
            raise file.error(name, f"has {len(values)} numbers; it must have 3, of red, green and blue")
    return torch.tensor(found)
