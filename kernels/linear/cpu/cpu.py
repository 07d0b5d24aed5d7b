"""Linear layers on quantized weights by the compiled CPU kernel (`cpu.cpp`).

Inputs in bfloat16 are multiplied as integers of 8 bits, with a factor for each 32 of them: four products an instruction
and lane. Inputs in float32 and float16 are multiplied as they are. Where the form itself says how inputs are rounded,
that is what happens, in every type.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from enum import IntEnum

import torch
import torch.nn.functional as F

from kernels.cpu_library import DTYPE_NUMBERS, CpuLibrary, cpu_library
from kernels.cpu_structures import QuantizedStructure, address_of
from kernels.linear.dense.cpu import panel_rows
from kernels.linear.forms import CodedMatrix, Number, QuantizedWeight, ScaledWeight


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
    """The offsets added to `scale * q`, in the smallest type that holds them exactly.

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


# Beyond, sums of products of 8 bits would not fit into 32.
MAX_INPUTS = 65536
_PADDED = 32
_VECTORS = 4


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedPanels:
    """A matrix as the kernel reads it."""

    structure: QuantizedStructure
    tensors: tuple[torch.Tensor | None, ...]
    num_inputs: int
    num_outputs: int

    @property
    def num_bytes(self) -> int:
        """Memory of the weights and what describes them."""
        return sum(tensor.nbytes for tensor in self.tensors if tensor is not None)


def input_layout(weight: QuantizedWeight) -> tuple[object, ...] | None:
    """Return what the layout of inputs depends on; None where the kernel does not support the matrix."""
    if weight.values.device.type != "cpu" or weight.shape[1] > MAX_INPUTS:
        return None
    if isinstance(weight, ScaledWeight):
        is_supported = weight.values.dtype is not torch.int8 or weight.has_row_scales
        return (weight.values.dtype, weight.has_row_scales, weight.activation) if is_supported else None
    # Pairs of floating point numbers are multiplied without offsets, 32 columns at a time.
    multiple = 16 if weight.number.is_integer else 32
    is_supported = weight.group_size % multiple == 0 or weight.scales.shape[1] == 1
    is_supported = is_supported and (weight.number.is_integer or not weight.has_offsets)
    return (weight.number, weight.group_size) if is_supported else None


def pack_quantized(
    library: CpuLibrary, weight: QuantizedWeight, bias: torch.Tensor | None = None, *, is_gated: bool = False
) -> QuantizedPanels:
    """Pack a matrix and its `[out_features]` bias; the plain one can be freed afterwards."""
    layout, width = make_layout(weight.coded()), library.panel_width()
    num_outputs, num_inputs = layout.codes.shape

    def panels(rows: torch.Tensor) -> torch.Tensor:
        """Put what a group has, for each feature of a panel, side by side."""
        padded = panel_rows(rows, width, is_gated)
        return padded.view(-1, width, rows.shape[1]).transpose(1, 2).contiguous()

    offsets = layout.offsets
    tensors = (
        _words(layout, panel_rows(layout.codes, width, is_gated), width // _VECTORS),
        panels(layout.scales),
        None if offsets.values is None else panels(offsets.values),
        None if bias is None else panels(bias.float()[:, None]),
        None if layout.input_order is None else layout.input_order.int(),
    )
    structure = QuantizedStructure(
        *map(address_of, tensors),
        num_inputs,
        num_outputs,
        layout.group_size,
        layout.number.index,
        DTYPE_NUMBERS[layout.scales.dtype],
        offsets.kind,
        offsets.zero_point if offsets.kind is OffsetKind.ZERO else 0.0,
        layout.rounding,
        0.0 if layout.activation_scale is None else float(layout.activation_scale),
    )
    return QuantizedPanels(structure, tensors, num_inputs, num_outputs)


def _words(layout: Layout, codes: torch.Tensor, lanes: int) -> torch.Tensor:
    """Put codes into words, and words into the order in which they are read: see weight.h and numbers.h.

    Shapes:
        codes: `[num_panels * panel_width, num_inputs]`
        result: `[num_panels, 2, num_words, vectors, lanes, 4]` uint8
    """
    codes = F.pad(codes, (0, -codes.shape[1] % _PADDED))
    if layout.number.bits == 4:
        both = codes.view(len(codes), -1, 2, 4)
        codes = both[:, :, 0] | both[:, :, 1] << 4
    else:
        codes = codes.view(len(codes), -1, 4)
    if not layout.number.is_integer:
        codes = codes[:, :, [0, 2, 1, 3]]
    halves = codes.view(-1, 2, _VECTORS // 2, lanes, codes.shape[1], 4)
    return halves.permute(0, 1, 4, 2, 3, 5).contiguous()


def pack_quantized_weight(weight: QuantizedWeight, bias: torch.Tensor | None = None) -> QuantizedPanels | None:
    """Pack a matrix for `quantized_linear`, or return None where no kernel supports it."""
    if input_layout(weight) is not None and (library := cpu_library()) is not None:
        return pack_quantized(library, weight, bias)
    return None


def quantized_linear(x: torch.Tensor, packed: QuantizedPanels, *, to_float32: bool = False) -> torch.Tensor:
    """Multiply rows by a packed matrix, and add its bias, in fp32, rounded once unless `to_float32`.

    Inputs in bfloat16 become integers of 8 bits with a factor for each 32 of them, unless the weights say how inputs
    are rounded. A row's bits do not depend on the rows beside it, nor on the number of threads.

    Shapes:
        x: `[num_rows, num_inputs]` float32, bfloat16 or float16; may be strided in its first dimension
        result: `[num_rows, num_outputs]`
    """
    library = cpu_library()
    assert library is not None
    if x.stride(1) != 1:
        x = x.contiguous()
    num_rows, dtype = x.shape[0], DTYPE_NUMBERS[x.dtype]
    result = torch.empty(num_rows, packed.num_outputs, dtype=torch.float32 if to_float32 else x.dtype)
    structure = ctypes.byref(packed.structure)
    scratch = torch.empty(library.quantized_linear_scratch(structure, dtype, num_rows), dtype=torch.uint8)
    numbers = x.stride(0), dtype, to_float32, num_rows, scratch.data_ptr(), torch.get_num_threads()
    library.quantized_linear(structure, x.data_ptr(), result.data_ptr(), *numbers)
    return result
