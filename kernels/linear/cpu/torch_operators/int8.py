"""8-bit integers with a scale a row: by `_weight_int8pack_mm`, or converted to the inputs' type at every call.

Both read the integers as the checkpoint has them: holding both takes no more memory than holding one.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kernels.linear.cpu.torch_operators.form import UnsupportedMatrixError
from kernels.linear.forms import ScaledWeight

_MULTIPLE = 32


class Int8Form:
    """A matrix that the operator decodes in registers: fast with few rows, each of which decodes it anew."""

    __slots__ = ("_scales", "_values")

    def __init__(self, weight: ScaledWeight, dtype: torch.dtype) -> None:
        """Hold the integers.

        Raises:
            UnsupportedMatrixError: The matrix has sizes that the operator does not check, but reads beyond.
        """
        rows, columns = weight.values.shape
        if rows % _MULTIPLE or columns % _MULTIPLE:
            raise UnsupportedMatrixError("int8pack", (rows, columns), f"multiples of {_MULTIPLE}")
        self._values = weight.values.contiguous()
        self._scales = weight.scales.expand(rows, 1).flatten().to(dtype).contiguous()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply rows."""
        result: torch.Tensor = torch.ops.aten._weight_int8pack_mm(x.contiguous(), self._values, self._scales)
        return result


class Int8ConvertedForm:
    """A matrix that is converted, without its scales, and multiplied densely: fast with many rows."""

    __slots__ = ("_scales", "_values")

    def __init__(self, weight: ScaledWeight, dtype: torch.dtype) -> None:
        """Hold the integers."""
        self._values = weight.values
        self._scales = weight.scales.flatten().to(dtype)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply rows."""
        return F.linear(x, self._values.to(x.dtype)).mul_(self._scales)
