"""The grid of a group-quantized matrix: evenly spaced levels, one scale and zero point a group of input features.

Scales are rounded to float16 before anything is rounded to the grid, because that is how checkpoints store them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

# The smallest positive float16; a scale of zero could not be divided by.
_SMALLEST_SCALE = 2.0**-24


@dataclass(frozen=True, slots=True, eq=False)
class GroupGrid:
    """Levels `scale * (value - zero)` for values `0 … 2**bits - 1`.

    Attributes:
        scales: `[out_features, num_groups]` float32, each exactly a float16.
        zeros: The same shape, whole numbers in float32.
    """

    bits: int
    group_size: int
    scales: torch.Tensor
    zeros: torch.Tensor

    def round(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the value of the nearest level of each weight, `[out_features, in_features]` uint8."""
        groups = grouped(weight, self.group_size)
        values = (groups / self.scales[:, :, None]).round_().add_(self.zeros[:, :, None])
        return values.clamp_(0, 2**self.bits - 1).flatten(1).to(torch.uint8)

    def level(self, values: torch.Tensor) -> torch.Tensor:
        """Return the weights that values stand for, `[out_features, in_features]` float32."""
        groups = grouped(values.float(), self.group_size)
        return ((groups - self.zeros[:, :, None]) * self.scales[:, :, None]).flatten(1)


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedMatrix:
    """A matrix on its grid; `values` as `GroupGrid.round` returns them."""

    grid: GroupGrid
    values: torch.Tensor

    def dequantize(self) -> torch.Tensor:
        """Return the weights, `[out_features, in_features]` float32."""
        return self.grid.level(self.values)

    def split(self, rows: Sequence[int]) -> list[QuantizedMatrix]:
        """Return the matrices that this one is made of; each has its number of `rows`."""
        parts = zip(
            *(tensor.split_with_sizes(rows) for tensor in (self.grid.scales, self.grid.zeros, self.values)), strict=True
        )
        grid = self.grid
        return [
            QuantizedMatrix(GroupGrid(grid.bits, grid.group_size, scales, zeros), values)
            for scales, zeros, values in parts
        ]


def grouped(matrix: torch.Tensor, group_size: int) -> torch.Tensor:
    """Return a view of a matrix as `[num_rows, num_groups, group_size]`."""
    return matrix.reshape(matrix.shape[0], -1, group_size)


def fit_grid(weight: torch.Tensor, bits: int, group_size: int, *, is_symmetric: bool) -> GroupGrid:
    """Return the grid that spans each group's weights.

    A symmetric grid has its zero in the middle, so the largest positive weight may lie half a level beyond its end. A
    group of zeros gets the smallest scale.

    Shapes:
        weight: `[out_features, in_features]` float32; `in_features` is a multiple of `group_size`
    """
    groups = grouped(weight, group_size)
    top = 2**bits - 1
    if is_symmetric:
        scales = _stored(groups.abs().amax(2) * (2 / top))
        return GroupGrid(bits, group_size, scales, torch.full_like(scales, 2 ** (bits - 1)))
    low, high = groups.amin(2).clamp_(max=0), groups.amax(2).clamp_(min=0)
    scales = _stored((high - low) / top)
    return GroupGrid(bits, group_size, scales, (-low / scales).round_().clamp_(0, top))


def round_to_nearest(weight: torch.Tensor, bits: int, group_size: int, *, is_symmetric: bool) -> QuantizedMatrix:
    """Round each weight to the nearest level of its group's grid: what the better methods are compared with."""
    grid = fit_grid(weight, bits, group_size, is_symmetric=is_symmetric)
    return QuantizedMatrix(grid, grid.round(weight))


def _stored(scales: torch.Tensor) -> torch.Tensor:
    largest = torch.finfo(torch.float16).max
    return scales.clamp(_SMALLEST_SCALE, largest).half().float()


_INT8_MAX = 127.0
_FLOAT8 = torch.float8_e4m3fn


@dataclass(frozen=True, slots=True, eq=False)
class ScaledRows:
    """Weights `values * scales`: `[out_features, in_features]` int8 or float8_e4m3fn, `[out_features, 1]` float32."""

    values: torch.Tensor
    scales: torch.Tensor

    def dequantize(self) -> torch.Tensor:
        """Return the weights, `[out_features, in_features]` float32."""
        return self.values.float() * self.scales

    def split(self, rows: Sequence[int]) -> list[ScaledRows]:
        """Split a fused matrix into its parts, each with this many rows."""
        parts = zip(self.values.split_with_sizes(rows), self.scales.split_with_sizes(rows), strict=True)
        return [ScaledRows(values, scales) for values, scales in parts]


def int8_rows(weight: torch.Tensor) -> ScaledRows:
    """Round each row of `[out_features, in_features]` float32 to 255 levels, the outermost at its largest magnitude."""
    scales = _scales(weight, _INT8_MAX)
    return ScaledRows((weight / scales).round_().to(torch.int8), scales)


def float8_rows(weight: torch.Tensor) -> ScaledRows:
    """Round each row to float8, its largest magnitude at the format's largest number."""
    scales = _scales(weight, torch.finfo(_FLOAT8).max)
    return ScaledRows((weight / scales).to(_FLOAT8), scales)


def _scales(weight: torch.Tensor, largest: float) -> torch.Tensor:
    """A row of zeros gets the scale 1."""
    magnitudes = weight.abs().amax(1, keepdim=True)
    return torch.where(magnitudes > 0, magnitudes / largest, 1.0)


Tensors = dict[str, torch.Tensor]

_ROWS = 1024


def gptq_tensors(matrix: QuantizedMatrix) -> Tensors:
    """Return the tensors of a matrix in GPTQ's convention, by what follows the module's name."""
    grid = matrix.grid
    num_inputs = matrix.values.shape[1]
    return {
        "qweight": _packed(matrix.values.T, grid.bits, dim=0),
        "qzeros": _packed(grid.zeros.T.to(torch.uint8) - 1, grid.bits, dim=1),
        "scales": grid.scales.T.half().contiguous(),
        "g_idx": torch.arange(num_inputs, dtype=torch.int32) // grid.group_size,
    }


def pack_quantized_tensors(matrix: QuantizedMatrix) -> Tensors:
    """Return the tensors of a symmetric matrix in compressed-tensors' packed convention."""
    return {
        "weight_packed": _packed(matrix.values, matrix.grid.bits, dim=1),
        "weight_scale": matrix.grid.scales.half(),
        "weight_shape": torch.tensor(matrix.values.shape, dtype=torch.int64),
    }


def scaled_row_tensors(rows: ScaledRows) -> Tensors:
    """Return the tensors of a matrix of int8 or float8 rows in compressed-tensors' conventions."""
    return {"weight": rows.values, "weight_scale": rows.scales}


def _packed(values: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """Put `32 / bits` consecutive values along `dim` into an int32, the first in the lowest bits."""
    if dim == 0:
        return _packed(values.T, bits, dim=1).T.contiguous()
    # A few rows at a time, which take eight times their memory: the head of a model may have most of its weights.
    return torch.cat([_packed_rows(rows, bits) for rows in torch.split(values, _ROWS)])


def _packed_rows(values: torch.Tensor, bits: int) -> torch.Tensor:
    per_word = 32 // bits
    words = grouped((values & (2**bits - 1)).to(torch.int64), per_word)
    packed = (words << torch.arange(per_word, device=values.device).mul(bits)).sum(2)
    # Words with the highest bit set wrap to negative numbers.
    return packed.to(torch.int32)
