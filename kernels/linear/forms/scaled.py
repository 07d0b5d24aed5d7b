"""Weights of eight bits with a scale for the tensor, a row or a block, whose inputs may be rounded too."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.linear.forms.numbers import FLOAT8, INT8, Activation, CodedMatrix, column_groups, is_same

SCALE_BLOCK = 128
"""Rows and columns that share a scale, where a matrix has one a block."""


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
        for part, group in column_groups(weight, SCALE_BLOCK):
            part.mul_(scales[:, group, None])
        return weight

    def to(self, device: torch.device) -> ScaledWeight:
        """Return the same weights on a device."""
        scale = None if self.activation_scale is None else self.activation_scale.to(device)
        return ScaledWeight(self.values.to(device), self.scales.to(device), self.activation, scale)

    def coded(self) -> CodedMatrix:
        """Return the matrix as kernels pack it. Signed integers become the unsigned ones that are greater by 128."""
        rows, columns = self.shape
        scales, group_size = self.scales, columns
        if not self.has_row_scales:
            scales, group_size = scales.repeat_interleave(SCALE_BLOCK, dim=0)[:rows], SCALE_BLOCK
        scales = scales.expand(rows, -1)
        number, codes, offsets = FLOAT8, self.values.view(torch.uint8), None
        if self.values.dtype is torch.int8:
            number, codes, offsets = INT8, codes ^ INT8.centre, -INT8.centre * scales
        return CodedMatrix(number, codes, scales, offsets, group_size, None, self.activation, self.activation_scale)

    def join(self, lower: object) -> ScaledWeight | None:
        """Return both matrices as one, this one above, or None when they are unlike."""
        if not isinstance(lower, ScaledWeight):
            return None
        if (self.values.dtype, self.activation) != (lower.values.dtype, lower.activation):
            return None
        if not is_same(self.activation_scale, lower.activation_scale):
            return None
        scales = self._joined_scales(lower)
        if scales is None:
            return None
        # Concatenation is not defined for float8 on every device: its bytes are.
        values = torch.cat((self.values.view(torch.int8), lower.values.view(torch.int8))).view(self.values.dtype)
        return ScaledWeight(values, scales, self.activation, self.activation_scale)

    def _joined_scales(self, lower: ScaledWeight) -> torch.Tensor | None:
        if self.has_row_scales and lower.has_row_scales:
            if self.scales.numel() == lower.scales.numel() == 1 and torch.equal(self.scales, lower.scales):
                return self.scales
            return torch.cat([form.scales.expand(form.shape[0], 1) for form in (self, lower)])
        if self.has_row_scales or lower.has_row_scales or self.shape[0] % SCALE_BLOCK:
            return None
        return torch.cat((self.scales, lower.scales))
