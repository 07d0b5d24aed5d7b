"""Weights whose numbers share scales and offsets in groups along the input."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.linear.forms.coded_matrix import CodedMatrix
from kernels.linear.forms.columns import column_groups, is_same
from kernels.linear.forms.numbers import Number


@dataclass(frozen=True, slots=True, eq=False)
class GroupQuantizedWeight:
    """Numbers of which a group along the input shares a scale and an offset: `w = scale * q + offset`.

    Attributes:
        values: Codes as `number` packs them: `[out_features, in_features / number.per_byte]` uint8.
        number: What codes stand for.
        group_size: Columns of a group; the last group may have fewer.
        scales: `[out_features, ceil(in_features / group_size)]` float32.
        offsets: The same shape, float32.
        input_order: Column `j` multiplies input feature `input_order[j]`; `[in_features]` int64. None is in order.
    """

    values: torch.Tensor
    number: Number
    group_size: int
    scales: torch.Tensor
    offsets: torch.Tensor
    input_order: torch.Tensor | None = None

    def __post_init__(self) -> None:
        rows, columns = self.shape
        num_groups = -(-columns // self.group_size)
        assert self.values.dtype is torch.uint8
        assert self.scales.shape == self.offsets.shape == (rows, num_groups)
        assert self.scales.dtype is self.offsets.dtype is torch.float32
        order = self.input_order
        assert order is None or (order.shape == (columns,) and order.dtype is torch.int64)

    @property
    def shape(self) -> tuple[int, int]:
        """`(out_features, in_features)`."""
        return (self.values.shape[0], self.values.shape[1] * self.number.per_byte)

    @property
    def num_bytes(self) -> int:
        """Memory of the weights and what describes them."""
        order = 0 if self.input_order is None else self.input_order.nbytes
        return self.values.nbytes + self.scales.nbytes + self.offsets.nbytes + order

    def dequantize(self) -> torch.Tensor:
        """Return the matrix in float32, its columns in the order of the input."""
        weight = self.number.decode(self.number.unpack(self.values))
        for part, group in column_groups(weight, self.group_size):
            part.mul_(self.scales[:, group, None]).add_(self.offsets[:, group, None])
        if self.input_order is None:
            return weight
        return torch.empty_like(weight).index_copy_(1, self.input_order, weight)

    def to(self, device: torch.device) -> GroupQuantizedWeight:
        """Return the same weights on a device."""
        order = None if self.input_order is None else self.input_order.to(device)
        values, scales, offsets = (part.to(device) for part in (self.values, self.scales, self.offsets))
        return GroupQuantizedWeight(values, self.number, self.group_size, scales, offsets, order)

    def coded(self) -> CodedMatrix:
        """Return the matrix as kernels pack it."""
        codes = self.number.unpack(self.values)
        offsets = self.offsets if self.offsets.any() else None
        return CodedMatrix(self.number, codes, self.scales, offsets, self.group_size, self.input_order)

    def join(self, lower: object) -> GroupQuantizedWeight | None:
        """Return both matrices as one, this one above, or None when they are unlike."""
        if not isinstance(lower, GroupQuantizedWeight):
            return None
        if (self.number, self.group_size) != (lower.number, lower.group_size):
            return None
        if not is_same(self.input_order, lower.input_order):
            return None
        values, scales, offsets = (
            torch.cat(pair)
            for pair in ((self.values, lower.values), (self.scales, lower.scales), (self.offsets, lower.offsets))
        )
        return GroupQuantizedWeight(values, self.number, self.group_size, scales, offsets, self.input_order)
