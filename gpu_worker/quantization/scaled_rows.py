"""Matrices with one scale a row: int8, and float8 in the e4m3 format without infinities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

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
        """Return the matrices of so many rows each that this one is made of."""
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
