"""Rows that are rounded to eight bits before a product, by whichever kernel has them in its registers last."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.linear.forms import SCALE_BLOCK

ROW_MULTIPLE = 4
"""Rows whose blocks have scales are padded to a multiple, and so are blocks along a row of the weight, as cuBLAS wants
their scales."""


@dataclass(frozen=True, slots=True, eq=False)
class InputRounding:
    """How a product wants its inputs rounded.

    Attributes:
        dtype: int8 or float8_e4m3fn.
        given_scale: Of all inputs, `[]` float32; None gives each row its own.
        has_blocks: Each block of `SCALE_BLOCK` columns of a row has a scale of its own.
    """

    dtype: torch.dtype
    given_scale: torch.Tensor | None = None
    has_blocks: bool = False

    def is_same(self, other: InputRounding) -> bool:
        """Return True where both round the same rows to the same bits; waits for the device."""
        if (self.dtype, self.has_blocks) != (other.dtype, other.has_blocks):
            return False
        if self.given_scale is None or other.given_scale is None:
            return self.given_scale is other.given_scale
        return torch.equal(self.given_scale, other.given_scale)

    def empty(self, num_rows: int, row_size: int, dtype: torch.dtype, device: torch.device) -> RoundedRows:
        """Return the memory for rows of a type."""
        num_parts = -(-row_size // SCALE_BLOCK) if self.has_blocks else 1
        padded_rows = -(-num_rows // ROW_MULTIPLE) * ROW_MULTIPLE if self.has_blocks else num_rows
        values = torch.empty((padded_rows, row_size), dtype=self.dtype, device=device)
        scales = torch.empty((num_parts, padded_rows), dtype=torch.float32, device=device).t()
        return RoundedRows(values, scales, num_rows, dtype)


@dataclass(frozen=True, slots=True, eq=False)
class RoundedRows:
    """Rows as a product takes them.

    Attributes:
        values: `[padded_rows, num_columns]`, of which rows beyond `num_rows` mean nothing.
        scales: `[padded_rows, num_parts]` float32, likewise; those of a part lie side by side.
        num_rows: That there are.
        dtype: Of the numbers that were rounded, and of the product's results.
    """

    values: torch.Tensor
    scales: torch.Tensor
    num_rows: int
    dtype: torch.dtype

    def __len__(self) -> int:
        return self.num_rows


Rows = torch.Tensor | RoundedRows
"""What a linear layer multiplies: `[num_rows, num_columns]`, or the same rounded as its `rounding` says."""


def common_rounding(roundings: Sequence[InputRounding | None]) -> InputRounding | None:
    """Return how all linear layers of an input want it rounded; None where some differ."""
    first = roundings[0]
    is_one = first is not None and all(other is not None and first.is_same(other) for other in roundings)
    return first if is_one else None
