"""Linear layers on quantized weights by the compiled kernel."""

from __future__ import annotations

import torch

from kernels.linear.cpu.cpu import QuantizedPanels
from kernels.linear.cpu.dispatch import quantized_linear


class KernelQuantizedLinear:
    """A linear layer on weights that are packed for the compiled kernel."""

    __slots__ = ("packed",)

    def __init__(self, packed: QuantizedPanels) -> None:
        """Hold the packed weights."""
        self.packed = packed

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply rows."""
        return quantized_linear(x, self.packed)

    def to_float32(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply rows, not rounded to the type of `x`."""
        return quantized_linear(x, self.packed, to_float32=True)
