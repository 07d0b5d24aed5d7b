"""How each public checkpoint convention stores one quantized matrix. The reverse is in `gpu_worker.quantization`.

- GPTQ (`quant_method: gptq`): eight 4-bit values of consecutive inputs in an int32, matrices transposed, zero points
  less one, a group index per input.
- compressed-tensors (`quant_method: compressed-tensors`): `pack-quantized` integers around zero, offset to be unsigned;
  `int-quantized` and `float-quantized` with one scale a row and inputs quantized per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ops.quantize.grid import QuantizedMatrix, grouped

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
    # Words with the highest bit set are negative numbers of 32 bits.
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)
