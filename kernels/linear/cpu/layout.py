"""What the kernel needs to know of a quantized matrix, in the smallest types that hold it exactly."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch

from kernels.linear.forms import CodedMatrix, Number


class OffsetKind(IntEnum):
    """`Offset` of weight.h."""

    ZERO = 0
    ZEROS = 1
    FLOAT = 2


class Rounding(IntEnum):
    """`Rounding` of weight.h, by the names of activations."""

    none = 0
    dynamic = 1
    static = 2


@dataclass(frozen=True, slots=True, eq=False)
class Offsets:
    """What is added to `scale * q`, in the smallest type that holds it exactly.

    Attributes:
        values: Zero points (uint8) or offsets (float32), `[num_outputs, num_groups]`; None with `ZERO`.
        zero_point: That of all groups, with `ZERO`.
    """

    kind: OffsetKind
    values: torch.Tensor | None = None
    zero_point: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """A matrix before it is put into panels.

    Attributes:
        codes: `[num_outputs, num_inputs]` uint8, whatever the number of bits.
        scales: `[num_outputs, num_groups]`, in the smallest floating point type that holds them exactly.
    """

    number: Number
    codes: torch.Tensor
    group_size: int
    scales: torch.Tensor
    offsets: Offsets
    input_order: torch.Tensor | None = None
    rounding: Rounding = Rounding.none
    activation_scale: torch.Tensor | None = None


def make_layout(matrix: CodedMatrix) -> Layout:
    """Describe a matrix."""
    offsets = Offsets(OffsetKind.ZERO) if matrix.offsets is None else _offsets(matrix.scales, matrix.offsets)
    return Layout(
        matrix.number,
        matrix.codes,
        matrix.group_size,
        _narrowest(matrix.scales),
        offsets,
        matrix.input_order,
        Rounding[matrix.activation],
        matrix.activation_scale,
    )


def _narrowest(scales: torch.Tensor) -> torch.Tensor:
    for dtype in (torch.float16, torch.bfloat16):
        if torch.equal(scales.to(dtype).float(), scales):
            return scales.to(dtype)
    return scales


def _offsets(scales: torch.Tensor, offsets: torch.Tensor) -> Offsets:
    zeros = torch.where(scales == 0, 0, -offsets / scales).round().nan_to_num()
    if torch.equal(0 - scales * zeros, offsets) and zeros.min() >= 0 and zeros.max() <= 255:
        most = zeros.max()
        if torch.equal(0 - scales * most, offsets):
            return Offsets(OffsetKind.ZERO, zero_point=float(most))
        return Offsets(OffsetKind.ZEROS, zeros.to(torch.uint8))
    return Offsets(OffsetKind.FLOAT, offsets)
