"""Random weights in a model's shape, made on the device: a step takes as long with them as with trained ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class RandomWeights:
    """A `WeightSource` that makes up what it is asked for, and remembers it for the peers that share it.

    Matrices keep the variance of what they multiply; normalisations do nothing; biases are zero.

    Attributes:
        tensors: By name in the checkpoint, views of what the model holds.
        matrices: Everything that multiplies, fused as the model holds it; the embedding is the first.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device, seed: int = 0) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.matrices: list[torch.Tensor] = []
        self._dtype = dtype
        self._device = device
        self._generator = torch.Generator(device).manual_seed(seed)

    def take(self, name: str, *shape: int) -> torch.Tensor:
        """Make one tensor."""
        return self.take_rows([name], [shape])

    def take_rows(self, names: Sequence[str], shapes: Sequence[tuple[int, ...]]) -> torch.Tensor:
        """Make several tensors, one after another along their first dimension."""
        rows = [shape[0] for shape in shapes]
        whole = torch.empty((sum(rows), *shapes[0][1:]), dtype=self._dtype, device=self._device)
        if whole.dim() == 2:
            whole.normal_(0.0, whole.shape[1] ** -0.5, generator=self._generator)
            self.matrices.append(whole)
        else:
            whole.fill_(0.0 if names[0].endswith(".bias") else 1.0)
        self.tensors |= zip(names, whole.split_with_sizes(rows), strict=True)
        return whole

    def discard(self, pattern: str) -> None:
        """Make nothing."""
