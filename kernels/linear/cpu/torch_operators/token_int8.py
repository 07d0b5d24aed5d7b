"""8-bit integers times inputs that are rounded to 8 bits too, by oneDNN: exact sums of the whole row.

Inputs become unsigned bytes around 128, the type for which oneDNN has fast products on x86.
"""

from __future__ import annotations

import torch

from kernels.linear.dense import PACKED_FOR_ROWS
from kernels.linear.forms import ScaledWeight

_MAX = 127
_ZERO = 128
# A row of zeros must not be divided by zero.
_MIN_SCALE = 1e-12


class TokenInt8Form:
    """A matrix in oneDNN's packing."""

    __slots__ = ("_activation_scale", "_no_zeros", "_scales", "_values")

    def __init__(self, weight: ScaledWeight) -> None:
        """Pack a matrix; the plain one can be freed afterwards."""
        rows, columns = weight.values.shape
        self._values = torch.ops.onednn.qlinear_prepack(weight.values.contiguous(), [PACKED_FOR_ROWS, columns])
        self._scales = weight.scales.expand(rows, 1).flatten().contiguous()
        self._no_zeros = torch.zeros(rows, dtype=torch.int32)
        # Of two dimensions, so that what it divides becomes float32.
        self._activation_scale = None if weight.activation_scale is None else weight.activation_scale.view(1, 1)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply rows."""
        scale = self._activation_scale
        if scale is None:
            largest = torch.linalg.vector_norm(x, torch.inf, 1, True, dtype=torch.float32)
            scale = largest.div_(_MAX).clamp_(min=_MIN_SCALE)
        codes = x.div(scale).round_().add_(_ZERO).clamp_(0, 255).to(torch.uint8)
        sums: torch.Tensor = torch.ops.onednn.qlinear_pointwise.default(
            codes,
            1.0,
            _ZERO,
            self._values,
            self._scales,
            self._no_zeros,
            None,
            1.0,
            0,
            torch.float32,
            "none",
            [],
            "",
        )
        return sums.mul_(scale).to(x.dtype)
