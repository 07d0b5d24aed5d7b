"""The numbers that quantized weights are stored as: codes of a few bits, and what each code stands for.

To add one, define it here, say how a GPU decodes it in `gpu_packed/triton_unpack.py`, and how a CPU does in
`cpu/numbers.h`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch


@dataclass(frozen=True, slots=True)
class Number:
    """One kind of number.

    Attributes:
        name: As the GPU's kernels and messages call it.
        index: As the CPU's kernels number it.
        bits: Of a code.
        centre: The code of an integer that GPUs subtract, so that a symmetric matrix has no offsets; else zero.
        dtype: A type of torch whose bits the codes are; None where they are unsigned integers.
        values: What each code stands for, where torch has no such type.
    """

    name: str
    index: int
    bits: int
    centre: int = 0
    dtype: torch.dtype | None = None
    values: tuple[float, ...] | None = None

    @property
    def is_integer(self) -> bool:
        """Whether codes are the numbers themselves."""
        return self.dtype is None and self.values is None

    @property
    def per_byte(self) -> int:
        """Codes that a byte holds where they are stored."""
        return 8 // self.bits

    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        """Return what codes, one a byte, stand for, in float32."""
        if self.values is not None:
            return torch.tensor(self.values, device=codes.device)[codes.int()]
        return (codes if self.dtype is None else codes.view(self.dtype)).float()

    def unpack(self, stored: torch.Tensor) -> torch.Tensor:
        """Return codes one a byte, of bytes that hold one or two; of two the low half comes first.

        Shapes:
            stored: `[rows, columns / per_byte]` uint8
            result: `[rows, columns]` uint8
        """
        return stored if self.bits == 8 else torch.stack((stored & 15, stored >> 4), dim=2).flatten(1)

    def pack(self, codes: torch.Tensor) -> torch.Tensor:
        """Do the opposite of `unpack`; the number of columns must be a multiple of `per_byte`."""
        return codes.contiguous() if self.bits == 8 else codes[:, 0::2] | (codes[:, 1::2] << 4)


def _with_sign(*magnitudes: float) -> tuple[float, ...]:
    return (*magnitudes, *(-magnitude for magnitude in magnitudes))


INT4 = Number("int4", 0, bits=4, centre=8)
INT8 = Number("int8", 1, bits=8, centre=128)
FLOAT8 = Number("fp8", 2, bits=8, dtype=torch.float8_e4m3fn)
FLOAT4 = Number("fp4", 3, bits=4, values=_with_sign(0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0))
"""e2m1 of the OCP's microscaling formats, version 1.0, section 5.3.3."""
NUMBERS = (INT4, INT8, FLOAT8, FLOAT4)
_INTEGERS = {number.bits: number for number in NUMBERS if number.is_integer}


def integers(bits: int) -> Number:
    """Return the unsigned integers of 4 or 8 bits."""
    return _INTEGERS[bits]


Activation = Literal["none", "dynamic", "static"]
"""How inputs are rounded before the product: not at all, with a scale a token, or with the checkpoint's own."""


@dataclass(frozen=True, slots=True, eq=False)
class CodedMatrix:
    """A matrix `scale * decoded code + offset`, of which a group of columns of a row shares scale and offset.

    Attributes:
        number: What codes stand for.
        codes: One a byte: `[out_features, in_features]` uint8.
        scales: `[out_features, ceil(in_features / group_size)]` float32.
        offsets: The same shape, float32; None where all are zero.
        group_size: Columns of a group; the last group may have fewer.
        input_order: Column `j` multiplies input feature `input_order[j]`; `[in_features]` int64. None is in order.
        activation: How inputs are rounded, to numbers of the same kind.
        activation_scale: `[]` float32, where it is "static".
    """

    number: Number
    codes: torch.Tensor
    scales: torch.Tensor
    offsets: torch.Tensor | None
    group_size: int
    input_order: torch.Tensor | None = None
    activation: Activation = "none"
    activation_scale: torch.Tensor | None = None


def column_groups(matrix: torch.Tensor, group_size: int) -> Iterator[tuple[torch.Tensor, slice]]:
    """Yield views of a matrix as groups of columns, and which groups they are: all whole ones, then one with fewer.

    Shapes:
        matrix: `[rows, columns]`
        view: `[rows, num_groups, group_size or fewer]`
    """
    rows, columns = matrix.shape
    num_whole = columns // group_size
    end = num_whole * group_size
    yield matrix[:, :end].view(rows, num_whole, group_size), slice(num_whole)
    if end < columns:
        yield matrix[:, end:].view(rows, 1, columns - end), slice(num_whole, num_whole + 1)


def is_same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    """Return True for equal tensors, and where neither is given."""
    if one is None or other is None:
        return one is other
    return torch.equal(one, other)
