"""Packs quantized matrices for the compiled kernel, where there is one, and the linear layer on them."""

from __future__ import annotations

import torch

from kernels.cpu_library import cpu_library
from kernels.linear.cpu.cpu import (
    QuantizedPanels,
    can_pack_quantized,
    pack_quantized,
    quantized_linear_cpu,
)
from kernels.linear.forms import QuantizedWeight


def pack_quantized_weight(weight: QuantizedWeight, bias: torch.Tensor | None = None) -> QuantizedPanels | None:
    """Pack a matrix for `quantized_linear`, or return None where no kernel supports it.

    Shapes:
        bias: `[num_outputs]`
    """
    if can_pack_quantized(weight) and (library := cpu_library()) is not None:
        return pack_quantized(library, weight, bias)
    return None


def quantized_linear(x: torch.Tensor, packed: QuantizedPanels, *, to_float32: bool = False) -> torch.Tensor:
    """Multiply rows by a packed matrix, and add its bias, in fp32, rounded once.

    Inputs in bfloat16 become integers of 8 bits with a factor for each 32 of them, unless the weights say how inputs
    are rounded. A row's bits do not depend on the rows beside it, nor on the number of threads.

    Args:
        x: float32, bfloat16 or float16; may be strided in its first dimension.
        packed: Made by `pack_quantized_weight`.
        to_float32: Leave the result in fp32.

    Shapes:
        x: `[num_rows, num_inputs]`
        result: `[num_rows, num_outputs]`
    """
    library = cpu_library()
    assert library is not None
    return quantized_linear_cpu(library, x, packed, to_float32=to_float32)


class KernelQuantizedLinear:
    """A linear layer on weights that are packed for the compiled kernel."""

    __slots__ = ("packed",)

    def __init__(self, packed: QuantizedPanels) -> None:
        self.packed = packed

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply rows."""
        return quantized_linear(x, self.packed)

    def to_float32(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply rows, not rounded to the type of `x`."""
        return quantized_linear(x, self.packed, to_float32=True)
