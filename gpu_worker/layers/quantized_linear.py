"""Linear layers on quantized weights, and on parts of unlike form."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from gpu_worker.quantization.weight_forms import GroupQuantizedWeight, ScaledWeight
from kernels.fp8_linear import Fp8Weight, fp8_linear
from kernels.int4_linear import Int4Weight, int4_linear
from kernels.int8_linear import Int8GroupWeight, Int8Weight, int8_group_linear, int8_linear

if TYPE_CHECKING:
    from gpu_worker.layers.linear import Linear


class QuantizedLinear:
    """A linear layer on weights in a quantized form."""

    __slots__ = ("_multiply",)

    def __init__(self, weight: GroupQuantizedWeight | ScaledWeight, bias: torch.Tensor | None) -> None:
        """Hold the weights."""
        self._multiply = _operation(weight, bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply rows."""
        return self._multiply(x)

    def to_float32(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply rows, not rounded to the type of `x`."""
        return self._multiply(x, to_float32=True)


class SplitLinear:
    """Linear layers of the same input, run one after another, their features side by side."""

    __slots__ = ("_parts",)

    def __init__(self, parts: Sequence[Linear]) -> None:
        """Hold the layers."""
        self._parts = tuple(parts)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply rows."""
        return torch.cat([part(x) for part in self._parts], dim=1)

    def to_float32(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply rows, not rounded to the type of `x` where the parts allow it."""
        return torch.cat([part.to_float32(x) for part in self._parts], dim=1)


def _operation(weight: GroupQuantizedWeight | ScaledWeight, bias: torch.Tensor | None) -> Callable[..., torch.Tensor]:
    """Choose the operation for a form, and bind its weights."""
    if isinstance(weight, GroupQuantizedWeight):
        groups = (weight.values, weight.scales, weight.offsets, weight.group_size, weight.input_order)
        if weight.bits == 4:
            return partial(int4_linear, weight=Int4Weight(*groups), bias=bias)
        return partial(int8_group_linear, weight=Int8GroupWeight(*groups), bias=bias)
    scaled = (weight.values, weight.scales, weight.activation, weight.activation_scale)
    if weight.values.dtype is torch.int8:
        return partial(int8_linear, weight=Int8Weight(*scaled), bias=bias)
    return partial(fp8_linear, weight=Fp8Weight(*scaled), bias=bias)
