"""Linear layers on quantized weights, and on parts of unlike form.

On a CPU with a compiler, weights are packed for its kernel, without one, for those of torch; on a GPU, for those of the
form's operation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from gpu_worker.layers.measured_linear import MeasuredLinear, PlainMatrix
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
from kernels.linear.cpu import PackedQuantizedWeight, QuantizedWeight, pack_quantized_weight, quantized_linear

if TYPE_CHECKING:
    from gpu_worker.layers.linear import Linear


def kernel_weight(weight: GroupQuantizedWeight | ScaledWeight) -> QuantizedWeight:
    """Return a form's weights as the kernels take them."""
    if isinstance(weight, GroupQuantizedWeight):
        groups = (weight.values, weight.scales, weight.offsets, weight.group_size, weight.input_order)
        return Int4Weight(*groups) if weight.bits == 4 else Int8GroupWeight(*groups)
    scaled = (weight.values, weight.scales, weight.activation, weight.activation_scale)
    return Int8Weight(*scaled) if weight.values.dtype is torch.int8 else Fp8Weight(*scaled)


def make_quantized_linear(
    weight: GroupQuantizedWeight | ScaledWeight, bias: torch.Tensor | None, dense: Callable[[torch.Tensor], Linear]
) -> Linear:
    """Choose the fastest form of a linear layer on quantized weights.

    Args:
        weight: In any form.
        bias: Added to every row.
        dense: Makes a layer of a dense matrix.

    Shapes:
        bias: `[out_features]`
    """
    plain = kernel_weight(weight)
    if (packed := pack_quantized_weight(plain, bias)) is not None:
        return KernelQuantizedLinear(packed)
    matrix, operation = _packed_for_operation(plain)
    if matrix is plain and plain.values.device.type == "cpu":
        return MeasuredLinear(PlainMatrix(weight, plain, partial(operation, weight=plain), dense), bias)
    return QuantizedLinear(partial(operation, weight=matrix, bias=bias))


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

    def __init__(self, multiply: Callable[..., torch.Tensor]) -> None:
        """Hold the form's operation, bound to its weights."""
        self._multiply = multiply

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


def _packed_for_operation(weight: QuantizedWeight) -> tuple[object, Callable[..., torch.Tensor]]:
    """Return a form's weights as they are multiplied fastest on their device, and its operation."""
    if isinstance(weight, Int4Weight):
        return pack_int4(weight), int4_linear
    if isinstance(weight, Int8GroupWeight):
        return pack_int8_groups(weight), int8_group_linear
    if isinstance(weight, Int8Weight):
        return pack_int8(weight), int8_linear
    return pack_fp8(weight), fp8_linear
