"""The grid of a group-quantized matrix: evenly spaced levels around zero, one scale a group of input features.

Scales are rounded to float16 before anything is rounded to the grid, because that is how checkpoints store them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

# The smallest positive float16; a scale of zero could not be divided by.
_SMALLEST_SCALE = 2.0**-24


@dataclass(frozen=True, slots=True, eq=False)
class GroupGrid:
    """Levels `scale * (value - zero)` for values `0 … 2**bits - 1`, whose zero is in the middle.

    Attributes:
        scales: `[out_features, num_groups]` float32, each exactly a float16.
    """

    bits: int
    group_size: int
    scales: torch.Tensor

    @property
    def zero(self) -> int:
        """The value that stands for zero."""
        return 1 << (self.bits - 1)

    def round(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the value of the nearest level of each weight, `[out_features, in_features]` uint8."""
        values = (grouped(weight, self.group_size) / self.scales[:, :, None]).round_().add_(self.zero)
        return values.clamp_(0, 2**self.bits - 1).flatten(1).to(torch.uint8)

    def level(self, values: torch.Tensor) -> torch.Tensor:
        """Return the weights that values stand for, `[out_features, in_features]` float32."""
        return ((grouped(values.float(), self.group_size) - self.zero) * self.scales[:, :, None]).flatten(1)


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
        parts = zip(self.grid.scales.split_with_sizes(rows), self.values.split_with_sizes(rows), strict=True)
        return [QuantizedMatrix(replace(self.grid, scales=scales), values) for scales, values in parts]


def grouped(matrix: torch.Tensor, group_size: int) -> torch.Tensor:
    """Return a view of a matrix as `[num_rows, num_groups, group_size]`."""
    return matrix.reshape(matrix.shape[0], -1, group_size)


def fit_grid(weight: torch.Tensor, bits: int, group_size: int) -> GroupGrid:
    """Return the grid that spans each group's weights.

    The largest positive weight may lie half a level beyond its end. A group of zeros gets the smallest scale.

    Shapes:
        weight: `[out_features, in_features]` float32; `in_features` is a multiple of `group_size`
    """
    largest = grouped(weight, group_size).abs().amax(2)
    return GroupGrid(bits, group_size, _stored(largest * (2 / (2**bits - 1))))


def round_to_nearest(weight: torch.Tensor, bits: int, group_size: int) -> QuantizedMatrix:
    """Round each weight to the nearest level of its group's grid: what the better methods are compared with."""
    grid = fit_grid(weight, bits, group_size)
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
        "qzeros": _packed(torch.full_like(grid.scales.T, grid.zero - 1, dtype=torch.uint8), grid.bits, dim=1),
        "scales": grid.scales.T.half().contiguous(),
        "g_idx": torch.arange(num_inputs, dtype=torch.int32) // grid.group_size,
    }


def pack_quantized_tensors(matrix: QuantizedMatrix) -> Tensors:
    """Return the tensors of a matrix in compressed-tensors' packed convention."""
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
