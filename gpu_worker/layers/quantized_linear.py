"""Linear layers on quantized weights, and on parts of unlike form.

On a CPU with a compiler, weights are packed for its kernel; on a GPU, for those of the form's operation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from gpu_worker.quantization.weight_forms import GroupQuantizedWeight, ScaledWeight
from kernels.fp8_linear import Fp8Weight, fp8_linear, pack_fp8
from kernels.int4_linear import Int4Weight, int4_linear, pack_int4
from kernels.int8_linear import (
    Int8GroupWeight,
    Int8Weight,
    int8_group_linear,
    int8_linear,
    pack_int8,
    pack_int8_groups,
)
from kernels.quantized_linear import PackedQuantizedWeight, QuantizedWeight, pack_quantized_weight, quantized_linear

if TYPE_CHECKING:
    from gpu_worker.layers.linear import Linear


def kernel_weight(weight: GroupQuantizedWeight | ScaledWeight) -> QuantizedWeight:
    """Return a form's weights as the kernels take them."""
    if isinstance(weight, GroupQuantizedWeight):
        groups = (weight.values, weight.scales, weight.offsets, weight.group_size, weight.input_order)
        return Int4Weight(*groups) if weight.bits == 4 else Int8GroupWeight(*groups)
    scaled = (weight.values, weight.scales, weight.activation, weight.activation_scale)
    return Int8Weight(*scaled) if weight.values.dtype is torch.int8 else Fp8Weight(*scaled)


def make_quantized_linear(weight: GroupQuantizedWeight | ScaledWeight, bias: torch.Tensor | None) -> Linear:
    """Choose the fastest form of a linear layer on quantized weights."""
    plain = kernel_weight(weight)
    packed = pack_quantized_weight(plain, bias)
    return QuantizedLinear(plain, bias) if packed is None else KernelQuantizedLinear(packed)


class KernelQuantizedLinear:
    """A linear layer on weights that are packed for the compiled kernel."""

    __slots__ = ("packed",)

    def __init__(self, packed: PackedQuantizedWeight) -> None:
        """Hold the packed weights."""
        self.packed = packed

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply rows."""
        return quantized_linear(x, self.packed)

    def to_float32(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply rows, not rounded to the type of `x`."""
        return quantized_linear(x, self.packed, to_float32=True)


class QuantizedLinear:
    """A linear layer on weights in a quantized form."""

    __slots__ = ("_multiply",)

    def __init__(self, weight: QuantizedWeight, bias: torch.Tensor | None) -> None:
        """Pack the weights; the plain ones can be freed afterwards."""
        self._multiply: Callable[..., torch.Tensor] = partial(_operation(weight), bias=bias)

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


def _operation(weight: QuantizedWeight) -> Callable[..., torch.Tensor]:
    """Bind an operation to its weights, in the form that is multiplied fastest on their device."""
    if isinstance(weight, Int4Weight):
        return partial(int4_linear, weight=pack_int4(weight))
    if isinstance(weight, Int8GroupWeight):
        return partial(int8_group_linear, weight=pack_int8_groups(weight))
    if isinstance(weight, Int8Weight):
        return partial(int8_linear, weight=pack_int8(weight))
    return partial(fp8_linear, weight=pack_fp8(weight))
