"""What a model takes its weights from: a checkpoint, or numbers made up for a measurement."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch


class WeightSource(Protocol):
    """Hands out tensors by their name in the checkpoint, in the model's dtype, on its device.

    Matrices may be in the 16 bits that they are stored in, where linear layers take that for float32.
    """

    def take(self, name: str, *shape: int) -> torch.Tensor:
        """Return one tensor, of exactly this shape."""
        ...

    def take_rows(self, names: Sequence[str], shapes: Sequence[tuple[int, ...]]) -> torch.Tensor:
        """Return several tensors, concatenated along their first dimension, as one."""
        ...

    def take_float32(self, name: str, *shape: int) -> torch.Tensor:
        """Return one tensor, of exactly this shape, in float32 whatever the model's dtype is."""
        ...

    def ones(self, size: int) -> torch.Tensor:
        """Return as many ones: the weights of a normalisation that has none."""
        ...

    def take_item(self, name: str, index: int, *shape: int) -> torch.Tensor:
        """Return one of the tensors that are stacked along the first dimension of one, which has this shape.

        Items are taken in order.
        """
        ...

    def has(self, name: str) -> bool:
        """Whether there is such a tensor."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape, as it is stored."""
        ...

    def error(self, name: str, problem: str) -> Exception:
        """Make the error that names a tensor and where it is stored."""
        ...

    def discard(self, pattern: str) -> None:
        """Count tensors whose whole name matches as taken: the model has no use for them."""
        ...
