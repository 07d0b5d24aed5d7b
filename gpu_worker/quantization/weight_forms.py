"""What a linear layer's weights can be in the engine, whatever the checkpoint's packing was.

Every form knows the plain formula of its values, `dequantize()`, which is the oracle of all kernels. Forms hold tensors
only and never change.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

Activation = Literal["none", "dynamic", "static"]

SCALE_BLOCK = 128
"""Rows and columns that share a scale, where a `ScaledWeight` has one a block."""


@dataclass(frozen=True, slots=True, eq=False)
class DenseWeight:
    """A matrix of floating point numbers, `[out_features, in_features]`."""

    weight: torch.Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """`(out_features, in_features)`."""
        return (self.weight.shape[0], self.weight.shape[1])

    @property
    def num_bytes(self) -> int:
        """Memory of the weights."""
        return self.weight.nbytes

    def dequantize(self) -> torch.Tensor:
        """Return the matrix in float32."""
        return self.weight.float()

    def to(self, device: torch.device) -> DenseWeight:
        """Return the same weights on a device."""
        return DenseWeight(self.weight.to(device))


@dataclass(frozen=True, slots=True, eq=False)
class GroupQuantizedWeight:
    """Unsigned integers, of which a group along the input shares a scale and an offset: `w = scale * q + offset`.

    Attributes:
        values: uint8. With 8 bits `[out_features, in_features]`; with 4 bits two values a byte, the even column in the
            low half: `[out_features, in_features / 2]`.
        bits: 4 or 8.
        group_size: Columns of a group; the last group may have fewer.
        scales: `[out_features, ceil(in_features / group_size)]` float32.
        offsets: The same shape, float32.
        input_order: Column `j` multiplies input feature `input_order[j]`; `[in_features]` int64. None is in order.
    """

    values: torch.Tensor
    bits: int
    group_size: int
    scales: torch.Tensor
    offsets: torch.Tensor
    input_order: torch.Tensor | None = None

    def __post_init__(self) -> None:
        rows, columns = self.shape
        num_groups = -(-columns // self.group_size)
        assert self.bits in (4, 8)
        assert self.values.dtype is torch.uint8
        assert self.scales.shape == self.offsets.shape == (rows, num_groups)
        assert self.scales.dtype is self.offsets.dtype is torch.float32
        order = self.input_order
        assert order is None or (order.shape == (columns,) and order.dtype is torch.int64)

    @property
    def shape(self) -> tuple[int, int]:
        """`(out_features, in_features)`."""
        return (self.values.shape[0], self.values.shape[1] * (8 // self.bits))

    @property
    def num_bytes(self) -> int:
        """Memory of the weights and what describes them."""
        order = 0 if self.input_order is None else self.input_order.nbytes
        return self.values.nbytes + self.scales.nbytes + self.offsets.nbytes + order

    def dequantize(self) -> torch.Tensor:
        """Return the matrix in float32, its columns in the order of the input."""
        rows, columns = self.shape
        values = self.values
        if self.bits == 4:
            values = torch.stack((values & 15, values >> 4), dim=2).view(rows, columns)
        weight = values.float()
        for part, group in _column_groups(weight, self.group_size):
            part.mul_(self.scales[:, group, None]).add_(self.offsets[:, group, None])
        if self.input_order is None:
            return weight
        return torch.empty_like(weight).index_copy_(1, self.input_order, weight)

    def to(self, device: torch.device) -> GroupQuantizedWeight:
        """Return the same weights on a device."""
        order = None if self.input_order is None else self.input_order.to(device)
        values, scales, offsets = (part.to(device) for part in (self.values, self.scales, self.offsets))
        return GroupQuantizedWeight(values, self.bits, self.group_size, scales, offsets, order)


@dataclass(frozen=True, slots=True, eq=False)
class ScaledWeight:
    """Signed numbers times a scale, for a whole tensor, a row, or a block of `SCALE_BLOCK` columns and rows.

    Attributes:
        values: int8 or float8_e4m3fn, `[out_features, in_features]`.
        scales: float32: `[1, 1]` for the tensor, `[out_features, 1]` for rows,
            `[ceil(out_features / SCALE_BLOCK), ceil(in_features / SCALE_BLOCK)]` for blocks.
        activation: How inputs are quantized before the product: not at all, with a scale a token (and a block of
            columns, where the weight has scales a block), or with one scale that the checkpoint gives.
        activation_scale: That one: `[]` float32.
    """

    values: torch.Tensor
    scales: torch.Tensor
    activation: Activation = "none"
    activation_scale: torch.Tensor | None = None

    def __post_init__(self) -> None:
        rows, columns = self.shape
        blocks = (-(-rows // SCALE_BLOCK), -(-columns // SCALE_BLOCK))
        assert self.values.dtype in (torch.int8, torch.float8_e4m3fn)
        assert tuple(self.scales.shape) in ((1, 1), (rows, 1), blocks)
        assert self.scales.dtype is torch.float32
        assert (self.activation_scale is not None) == (self.activation == "static")
        assert self.activation_scale is None or self.activation_scale.shape == ()

    @property
    def shape(self) -> tuple[int, int]:
        """`(out_features, in_features)`."""
        return (self.values.shape[0], self.values.shape[1])

    @property
    def num_bytes(self) -> int:
        """Memory of the weights and their scales."""
        return self.values.nbytes + self.scales.nbytes

    @property
    def has_row_scales(self) -> bool:
        """Whether a row has one scale over all columns: its own, or the tensor's."""
        return self.scales.shape[1] == 1 and self.scales.shape[0] in (1, self.shape[0])

    def dequantize(self) -> torch.Tensor:
        """Return the matrix in float32."""
        weight = self.values.float()
        if self.has_row_scales:
            return weight.mul_(self.scales)
        scales = self.scales.repeat_interleave(SCALE_BLOCK, dim=0)[: weight.shape[0]]
        for part, group in _column_groups(weight, SCALE_BLOCK):
            part.mul_(scales[:, group, None])
        return weight

    def to(self, device: torch.device) -> ScaledWeight:
        """Return the same weights on a device."""
        scale = None if self.activation_scale is None else self.activation_scale.to(device)
        return ScaledWeight(self.values.to(device), self.scales.to(device), self.activation, scale)


@dataclass(frozen=True, slots=True, eq=False)
class SplitWeight:
    """Matrices of the same input, one above the other, that no single form can hold."""

    parts: tuple[DenseWeight | GroupQuantizedWeight | ScaledWeight, ...]

    @property
    def shape(self) -> tuple[int, int]:
        """`(out_features, in_features)`."""
        return (sum(part.shape[0] for part in self.parts), self.parts[0].shape[1])

    @property
    def num_bytes(self) -> int:
        """Memory of all parts."""
        return sum(part.num_bytes for part in self.parts)

    def dequantize(self) -> torch.Tensor:
        """Return the matrix in float32."""
        return torch.cat([part.dequantize() for part in self.parts])

    def to(self, device: torch.device) -> SplitWeight:
        """Return the same weights on a device."""
        return SplitWeight(tuple(part.to(device) for part in self.parts))


UnsplitWeight = DenseWeight | GroupQuantizedWeight | ScaledWeight
WeightForm = UnsplitWeight | SplitWeight


def concatenate(forms: Sequence[WeightForm]) -> WeightForm:
    """Put matrices of the same input one above the other; those of unlike form stay parts of a `SplitWeight`.

    Raises:
        ValueError: There are none, or they have different numbers of input features.
    """
    if len({form.shape[1] for form in forms}) != 1:
        raise ValueError(f"cannot concatenate weights with input features {[form.shape[1] for form in forms]}")
    merged: list[UnsplitWeight] = []
    for form in forms:
        for part in form.parts if isinstance(form, SplitWeight) else (form,):
            joined = _join(merged[-1], part) if merged else None
            if joined is None:
                merged.append(part)
            else:
                merged[-1] = joined
    return merged[0] if len(merged) == 1 else SplitWeight(tuple(merged))


def _column_groups(matrix: torch.Tensor, group_size: int) -> Iterator[tuple[torch.Tensor, slice]]:
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


def _join(upper: UnsplitWeight, lower: UnsplitWeight) -> UnsplitWeight | None:
    """Return both as one, or None when they are unlike."""
    if isinstance(upper, DenseWeight) and isinstance(lower, DenseWeight):
        is_like = upper.weight.dtype is lower.weight.dtype
        return DenseWeight(torch.cat((upper.weight, lower.weight))) if is_like else None
    if isinstance(upper, GroupQuantizedWeight) and isinstance(lower, GroupQuantizedWeight):
        return _join_groups(upper, lower)
    if isinstance(upper, ScaledWeight) and isinstance(lower, ScaledWeight):
        return _join_scaled(upper, lower)
    return None


def _join_groups(upper: GroupQuantizedWeight, lower: GroupQuantizedWeight) -> GroupQuantizedWeight | None:
    if (upper.bits, upper.group_size) != (lower.bits, lower.group_size):
        return None
    if not _is_same(upper.input_order, lower.input_order):
        return None
    values, scales, offsets = (
        torch.cat(pair)
        for pair in ((upper.values, lower.values), (upper.scales, lower.scales), (upper.offsets, lower.offsets))
    )
    return GroupQuantizedWeight(values, upper.bits, upper.group_size, scales, offsets, upper.input_order)


def _join_scaled(upper: ScaledWeight, lower: ScaledWeight) -> ScaledWeight | None:
    if (upper.values.dtype, upper.activation) != (lower.values.dtype, lower.activation):
        return None
    if not _is_same(upper.activation_scale, lower.activation_scale):
        return None
    scales = _joined_scales(upper, lower)
    if scales is None:
        return None
    # Concatenation is not defined for float8 on every device: its bytes are.
    values = torch.cat((upper.values.view(torch.int8), lower.values.view(torch.int8))).view(upper.values.dtype)
    return ScaledWeight(values, scales, upper.activation, upper.activation_scale)


def _joined_scales(upper: ScaledWeight, lower: ScaledWeight) -> torch.Tensor | None:
    """Scales of both: of rows, or of blocks where the boundary between the two is one between blocks."""
    if upper.has_row_scales and lower.has_row_scales:
        if upper.scales.numel() == lower.scales.numel() == 1 and torch.equal(upper.scales, lower.scales):
            return upper.scales
        return torch.cat([form.scales.expand(form.shape[0], 1) for form in (upper, lower)])
    is_aligned = upper.shape[0] % SCALE_BLOCK == 0
    if upper.has_row_scales or lower.has_row_scales or not is_aligned:
        return None
    return torch.cat((upper.scales, lower.scales))


def _is_same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one, other)
