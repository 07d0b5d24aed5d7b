"""What the kernel needs to know of a quantized matrix, whatever its form: codes, scales and offsets."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch

from kernels.fp8_linear import SCALE_BLOCK, Fp8Weight
from kernels.int4_linear import Int4Weight
from kernels.int8_linear import Int8GroupWeight, Int8Weight

QuantizedWeight = Int4Weight | Int8GroupWeight | Int8Weight | Fp8Weight


class Form(IntEnum):
    """`Form` of weight.h."""

    GROUPS = 0
    TOKENS = 1
    FLOAT8 = 2


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

    form: Form
    codes: torch.Tensor
    bits: int
    group_size: int
    scales: torch.Tensor
    offsets: Offsets
    input_order: torch.Tensor | None = None
    rounding: Rounding = Rounding.none
    activation_scale: torch.Tensor | None = None


def make_layout(weight: QuantizedWeight) -> Layout:
    """Describe a matrix."""
    if isinstance(weight, Int4Weight):
        codes = torch.stack((weight.values & 15, weight.values >> 4), dim=2).flatten(1)
        return _groups(weight, codes, 4)
    if isinstance(weight, Int8GroupWeight):
        return _groups(weight, weight.values, 8)
    rounding, (num_outputs, num_inputs) = Rounding[weight.activation], weight.values.shape
    bytes_ = weight.values.view(torch.uint8)
    if isinstance(weight, Int8Weight):
        form = Form.GROUPS if rounding is Rounding.none else Form.TOKENS
        scales = _narrowest(weight.scales.expand(num_outputs, 1))
        # From zero on: the kernel multiplies unsigned bytes.
        offsets = Offsets(OffsetKind.ZERO, zero_point=128.0)
        codes = bytes_ ^ 128
        return Layout(form, codes, 8, num_inputs, scales, offsets, None, rounding, weight.activation_scale)
    group_size = SCALE_BLOCK if weight.has_blocks else num_inputs
    scales = weight.scales.repeat_interleave(SCALE_BLOCK, dim=0) if weight.has_blocks else weight.scales
    scales = _narrowest(scales[:num_outputs].expand(num_outputs, -1))
    none = Offsets(OffsetKind.ZERO)
    return Layout(Form.FLOAT8, bytes_, 8, group_size, scales, none, None, rounding, weight.activation_scale)


def _groups(weight: Int4Weight | Int8GroupWeight, codes: torch.Tensor, bits: int) -> Layout:
    scales, offsets = _narrowest(weight.scales), _offsets(weight.scales, weight.offsets)
    return Layout(Form.GROUPS, codes, bits, weight.group_size, scales, offsets, weight.input_order)


def _narrowest(scales: torch.Tensor) -> torch.Tensor:
    """Return scales in 16 bits where that is exact: they are read with the weights."""
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
