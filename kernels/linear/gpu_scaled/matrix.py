"""What such a linear layer is made of."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.linear.split_k import MIN_BLOCK_N

SCALE_BLOCK = 128
"""Rows and columns that share a scale, where a matrix has one a block."""


@dataclass(frozen=True, slots=True, eq=False)
class ScaledMatrix:
    """A matrix `scale * value`.

    Attributes:
        values: `[out_features, in_features]` int8 or float8_e4m3fn, contiguous.
        scales: float32: `[out_features]`, or one a block:
            `[ceil(out_features / SCALE_BLOCK), ceil(in_features / SCALE_BLOCK)]`.
        activation_scale: Of all inputs, `[]` float32; None gives each token its own (and each block of its columns,
            where the matrix has blocks).
        counters: Zero whenever no product is running; int32, one a block of features.
    """

    values: torch.Tensor
    scales: torch.Tensor
    activation_scale: torch.Tensor | None
    counters: torch.Tensor

    @property
    def has_blocks(self) -> bool:
        """Whether scales are those of blocks."""
        return self.scales.dim() == 2


def scale_matrix(
    values: torch.Tensor, scales: torch.Tensor, activation_scale: torch.Tensor | None, *, has_blocks: bool
) -> ScaledMatrix:
    """Take a matrix with scales as `[1, 1]`, `[out_features, 1]`, or of blocks, as they are."""
    rows = values.shape[0]
    counters = torch.zeros(-(-rows // MIN_BLOCK_N), dtype=torch.int32, device=values.device)
    scales = scales.contiguous() if has_blocks else scales.flatten().expand(rows).contiguous()
    return ScaledMatrix(values.contiguous(), scales, activation_scale, counters)
