"""What a linear layer of 8-bit floating point numbers is made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

SCALE_BLOCK = 128
"""Rows and columns that share a scale, where a matrix has one a block."""


@dataclass(frozen=True, slots=True, eq=False)
class Fp8Weight:
    """A matrix `scale * value`.

    Attributes:
        values: `[out_features, in_features]` float8_e4m3fn.
        scales: float32: `[1, 1]`, `[out_features, 1]`, or one a block:
            `[ceil(out_features / SCALE_BLOCK), ceil(in_features / SCALE_BLOCK)]`.
        activation: Whether inputs are quantized too: with a scale a token (and a block of columns, where the matrix has
            blocks), or with `activation_scale`.
        activation_scale: `[]` float32.
    """

    values: torch.Tensor
    scales: torch.Tensor
    activation: Literal["none", "dynamic", "static"] = "none"
    activation_scale: torch.Tensor | None = None

    @property
    def has_blocks(self) -> bool:
        """Whether scales are those of blocks, not of rows or of the whole matrix."""
        return self.scales.shape[1] != 1 or self.scales.shape[0] not in (1, self.values.shape[0])
