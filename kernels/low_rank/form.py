"""An adapter's part beside one matrix: pairs of thin matrices."""

from __future__ import annotations

from dataclasses import dataclass

import torch

PAGE_BYTES = 2 << 20
"""Memory that an adapter takes at a time: a large page of a processor, and of torch's memory on a GPU."""


def whole_pages(num_bytes: int) -> int:
    """Round a number of bytes up to whole pages."""
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


@dataclass(frozen=True, slots=True, eq=False)
class LowRankPart:
    """What an adapter adds to some features: `scale * up @ down @ x`.

    Attributes:
        down: `[rank, in_features]`.
        up: `[num_features, rank]`, of the type of `down`.
        scale: What the product is multiplied by.
        features: `[num_features]` int64, which features of the matrix these are, each at most once.

    Source: Hu et al., LoRA, arXiv 2106.09685, equation 3.
    """

    down: torch.Tensor
    up: torch.Tensor
    scale: float
    features: torch.Tensor

    @property
    def rank(self) -> int:
        """Features between the two matrices."""
        return len(self.down)


@dataclass(frozen=True, slots=True, eq=False)
class LowRank:
    """What an adapter adds to the product of a matrix; parts may share features.

    Attributes:
        shape: Of the matrix: `(out_features, in_features)`.
        is_gated: The first half of the features are gates of the second half, and the matrix is packed so.
    """

    parts: tuple[LowRankPart, ...]
    shape: tuple[int, int]
    is_gated: bool = False

    @property
    def rank(self) -> int:
        """Features between the matrices of all parts."""
        return sum(part.rank for part in self.parts)

    @property
    def num_bytes(self) -> int:
        """Memory of all matrices."""
        return sum(part.down.nbytes + part.up.nbytes for part in self.parts)

    def to(self, device: torch.device) -> LowRank:
        """Return the same on another device."""
        parts = [
            LowRankPart(part.down.to(device), part.up.to(device), part.scale, part.features.to(device))
            for part in self.parts
        ]
        return LowRank(tuple(parts), self.shape, self.is_gated)

    def of_rows(self, rows: torch.Tensor, columns: torch.Tensor | None = None) -> LowRank | None:
        """Return the part for some features, which may be repeated, and all inputs or some; None if it adds nothing.

        Shapes:
            rows: `[num_rows]` int64
            columns: `[num_columns]` int64
        """
        parts = []
        for part in self.parts:
            places = torch.full((self.shape[0],), -1)
            places[part.features] = torch.arange(len(part.features))
            features = (places[rows] >= 0).nonzero()[:, 0]
            if len(features):
                down = part.down if columns is None else part.down[:, columns]
                parts.append(LowRankPart(down, part.up[places[rows][features]], part.scale, features))
        shape = (len(rows), self.shape[1] if columns is None else len(columns))
        return LowRank(tuple(parts), shape, self.is_gated) if parts else None
