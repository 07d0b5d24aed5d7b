"""4-bit groups by `_weight_int4pack_mm_for_cpu`: codes are read as they are, sums are in fp32."""

from __future__ import annotations

import torch

from kernels.linear.forms import GroupQuantizedWeight

# The operator's code 8 stands for zero.
_ZERO = 8


class Int4Form:
    """A matrix in the operator's packing. Scales and offsets have the type of the inputs."""

    __slots__ = ("_codes", "_group_size", "_input_order", "_scales_and_zeros")

    def __init__(self, weight: GroupQuantizedWeight, dtype: torch.dtype) -> None:
        """Pack a matrix; the plain one can be freed afterwards.

        Raises:
            RuntimeError: The operator refuses its shape; it refuses sizes of groups only when it is called.
        """
        codes = weight.number.unpack(weight.values).int()
        self._codes = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
        scales = weight.scales.float()
        zeros = _ZERO * scales if weight.offsets is None else weight.offsets + _ZERO * scales
        self._scales_and_zeros = torch.stack((scales.T, zeros.T), dim=2).to(dtype).contiguous()
        self._group_size = weight.group_size
        self._input_order = weight.input_order

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply rows."""
        ordered = x.contiguous() if self._input_order is None else x[:, self._input_order]
        result: torch.Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(
            ordered, self._codes, self._group_size, self._scales_and_zeros
        )
        return result
