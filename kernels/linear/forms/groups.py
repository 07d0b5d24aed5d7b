"""Weights whose numbers share scales and offsets in groups along the input."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.linear.forms.numbers import CodedMatrix, Number, column_groups, is_same


@dataclass(frozen=True, slots=True, eq=False)
class GroupQuantizedWeight:
    """Numbers of which a group along the input shares a scale and an offset: `w = scale * q + offset`.

    Attributes:
        values: Codes as `number` packs them: `[out_features, in_features / number.per_byte]` uint8.
        number: What codes stand for.
        group_size: Columns of a group; the last group may have fewer.
        scales: `[out_features, ceil(in_features / group_size)]` float32, or float8_e8m0fnu, which are powers of two.
        offsets: The same shape, float32; None where all are zero.
        input_order: Column `j` multiplies input feature `input_order[j]`; `[in_features]` int64. None is in order.
    """

    values: torch.Tensor
    number: Number
    group_size: int
    scales: torch.Tensor
    offsets: torch.Tensor | None = None
    input_order: torch.Tensor | None = None

    def __post_init__(self) -> None:
        rows, columns = self.shape
        num_groups = -(-columns // self.group_size)
        assert self.values.dtype is torch.uint8
        assert self.scales.shape == (rows, num_groups)
        assert self.scales.dtype in (torch.float32, torch.float8_e8m0fnu)
        offsets = self.offsets
        assert offsets is None or (offsets.shape == (rows, num_groups) and offsets.dtype is torch.float32)
        order = self.input_order
        assert order is None or (order.shape == (columns,) and order.dtype is torch.int64)

    @property
    def shape(self) -> tuple[int, int]:
        """`(out_features, in_features)`."""
        return (self.values.shape[0], self.values.shape[1] * self.number.per_byte)

    @property
    def num_bytes(self) -> int:
        """Memory of the weights and what describes them."""
        beside = sum(part.nbytes for part in (self.offsets, self.input_order) if part is not None)
        return self.values.nbytes + self.scales.nbytes + beside

    @property
    def has_offsets(self) -> bool:
        """Whether any offset is not zero."""
        return self.offsets is not None and bool(self.offsets.any())

    def dequantize(self) -> torch.Tensor:
        """Return the matrix in float32, its columns in the order of the input."""
        weight = self.number.decode(self.number.unpack(self.values))
        scales = self.scales.float()
        for part, group in column_groups(weight, self.group_size):
            part.mul_(scales[:, group, None])
            if self.offsets is not None:
                part.add_(self.offsets[:, group, None])
        if self.input_order is None:
            return weight
        return torch.empty_like(weight).index_copy_(1, self.input_order, weight)

    def to(self, device: torch.device) -> GroupQuantizedWeight:
        """Return the same weights on a device."""
        values, scales = self.values.to(device), self.scales.to(device)
        offsets, order = (None if part is None else part.to(device) for part in (self.offsets, self.input_order))
        return GroupQuantizedWeight(values, self.number, self.group_size, scales, offsets, order)

    def coded(self) -> CodedMatrix:
        """Return the matrix as kernels pack it."""
        codes = self.number.unpack(self.values)
        offsets = self.offsets if self.has_offsets else None
        return CodedMatrix(self.number, codes, self.scales.float(), offsets, self.group_size, self.input_order)

    def join(self, lower: object) -> GroupQuantizedWeight | None:
        """Return both matrices as one, this one above, or None when they are unlike."""
        if not isinstance(lower, GroupQuantizedWeight):
            return None
        if (self.number, self.group_size, self.scales.dtype) != (lower.number, lower.group_size, lower.scales.dtype):
            return None
        if not is_same(self.input_order, lower.input_order):
            return None
        values = torch.cat((self.values, lower.values))
        scales = _joined(self.scales, lower.scales)
        offsets = None
        if self.offsets is not None or lower.offsets is not None:
            offsets = torch.cat([form._offsets_or_zeros() for form in (self, lower)])
        return GroupQuantizedWeight(values, self.number, self.group_size, scales, offsets, self.input_order)

    def _offsets_or_zeros(self) -> torch.Tensor:
        return torch.zeros(self.scales.shape, device=self.scales.device) if self.offsets is None else self.offsets


def _joined(upper: torch.Tensor, lower: torch.Tensor) -> torch.Tensor:
    if upper.itemsize > 1:
        return torch.cat((upper, lower))
    # Concatenation is not defined for float8 on every device: its bytes are.
    return torch.cat((upper.view(torch.uint8), lower.view(torch.uint8))).view(upper.dtype)
