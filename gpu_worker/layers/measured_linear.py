"""Linear layers on quantized weights where no kernel of ours runs: in the forms that were measured fastest here.

torch has operators for some forms, each fast with some numbers of rows on some processors, and any matrix can be
dequantized once, which takes memory. What is fastest is measured once for a shape, and kept, with what is left of the
memory for dequantized copies, for the life of the process.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch

from gpu_worker.layers.free_memory import free_host_bytes
from gpu_worker.quantization.weight_forms import GroupQuantizedWeight, ScaledWeight
from kernels.fp8_linear import Fp8Weight
from kernels.fp8_linear.reference import round_tokens
from kernels.int4_linear import Int4Weight
from kernels.int8_linear import Int8Weight
from kernels.int8_linear.reference import quantize_tokens
from kernels.linear.cpu import QuantizedWeight
from kernels.linear.cpu.torch_operators import (
    FORMULA,
    Form,
    Int4Form,
    Int8ConvertedForm,
    Int8Form,
    RowForms,
    TokenInt8Form,
    choose,
    describe,
    measure,
)

if TYPE_CHECKING:
    from gpu_worker.layers.linear import Linear

logger = logging.getLogger(__name__)

_DENSE = "dense"
_SHARE_FOR_COPIES = 0.5


@dataclass(frozen=True, slots=True)
class PlainMatrix:
    """A quantized matrix as it was loaded.

    Attributes:
        form: Its values.
        weight: The same, as kernels take them.
        formula: Multiplies with it in plain torch.
        dense: Makes a layer of a dense matrix.
    """

    form: GroupQuantizedWeight | ScaledWeight
    weight: QuantizedWeight
    formula: Form
    dense: Callable[[torch.Tensor], Linear]

    def kind(self) -> tuple[Hashable, ...]:
        """Return what the time of a product depends on."""
        form = self.form
        if isinstance(form, GroupQuantizedWeight):
            return (f"{form.bits}-bit groups of {form.group_size}", form.shape, form.input_order is None)
        name = str(form.values.dtype).removeprefix("torch.")
        return (f"{name} with inputs rounded: {form.activation}", form.shape, tuple(form.scales.shape))

    def largest_input(self) -> float:
        """Return the largest input that eight bits hold, where the checkpoint says what their scale is."""
        scale = self.form.activation_scale if isinstance(self.form, ScaledWeight) else None
        return 1.0 if scale is None else float(scale) * torch.iinfo(torch.int8).max

    def makers(self, dtype: torch.dtype, *, is_dense_allowed: bool) -> dict[str, Callable[[], Form]]:
        """Return what makes the forms that the matrix may have, by their names."""
        weight, makers = self.weight, dict[str, Callable[[], Form]]()
        if isinstance(weight, Int4Weight):
            makers["int4pack"] = partial(Int4Form, weight, dtype)
        elif isinstance(weight, Int8Weight) and weight.activation == "none":
            makers["int8pack"] = partial(Int8Form, weight, dtype)
            makers["converted"] = partial(Int8ConvertedForm, weight, dtype)
        elif isinstance(weight, Int8Weight):
            makers["qlinear"] = partial(TokenInt8Form, weight)
        if is_dense_allowed:
            makers[_DENSE] = partial(self._dense, dtype)
        else:
            # Dequantizes at every call: only with many rows is it faster than an operator without vector instructions.
            makers[FORMULA] = lambda: self.formula
        return makers

    def _dense(self, dtype: torch.dtype) -> Form:
        multiply, weight = self.dense(self.form.dequantize().to(dtype)), self.weight
        if isinstance(weight, Fp8Weight) and weight.activation != "none":
            return lambda x: multiply(round_tokens(x, weight).to(x.dtype))
        if isinstance(weight, Int8Weight) and weight.activation != "none":
            return lambda x: multiply(_round_to_integers(x, weight.activation_scale))
        return multiply


@dataclass(slots=True)
class Measured:
    """What this process has measured, and the memory that it has left for copies larger than what was loaded."""

    spare_bytes: int
    names: dict[tuple[Hashable, ...], tuple[str, ...]] = field(default_factory=dict)

    def forms(self, matrix: PlainMatrix, dtype: torch.dtype) -> RowForms:
        """Choose the forms of a matrix, and make them."""
        rows, columns = matrix.form.shape
        dense_bytes = rows * columns * dtype.itemsize
        makers = matrix.makers(dtype, is_dense_allowed=dense_bytes <= self.spare_bytes)
        key = (*matrix.kind(), dtype, torch.get_num_threads(), _DENSE in makers)
        if key not in self.names:
            seconds = measure(makers, matrix.formula, columns, dtype, matrix.largest_input())
            self.names[key] = choose(seconds, larger=(_DENSE,))
            logger.info("%s, %dx%d in %s: %s", key[0], rows, columns, dtype, describe(self.names[key], seconds))
        names = self.names[key]
        if _DENSE in names:
            self.spare_bytes -= dense_bytes
        makers.setdefault(FORMULA, lambda: matrix.formula)
        made = {name: makers[name]() for name in set(names)}
        return RowForms(tuple(made[name] for name in names))


@functools.cache
def measured() -> Measured:
    """Return what the process has measured: at the first call nothing, and half of the memory is spare."""
    return Measured(int(free_host_bytes() * _SHARE_FOR_COPIES))


class MeasuredLinear:
    """A linear layer that takes its form at its first call.

    Only then are the type of its inputs known, and what memory all weights and the KV cache have left. Workers call it
    before they are ready.
    """

    __slots__ = ("_bias", "_dtype", "_forms", "_num_outputs", "_plain")

    def __init__(self, plain: PlainMatrix, bias: torch.Tensor | None) -> None:
        """Hold the weights as they were loaded, until the first call."""
        self._plain: PlainMatrix | None = plain
        self._forms: RowForms | None = None
        self._dtype = torch.float32
        self._num_outputs = plain.form.shape[0]
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply rows."""
        if not x.shape[0]:
            return x.new_empty(0, self._num_outputs)
        forms = self._forms or self._take_form(x.dtype)
        result = forms(x.to(self._dtype)).to(x.dtype)
        return result if self._bias is None else result.add_(self._bias)

    def to_float32(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply rows."""
        return self(x).float()

    def _take_form(self, dtype: torch.dtype) -> RowForms:
        assert self._plain is not None
        forms = measured().forms(self._plain, dtype)
        self._dtype, self._forms, self._plain = dtype, forms, None
        return forms


def _round_to_integers(x: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """Return what the integers and scales of rows stand for, in their type."""
    values, scales = quantize_tokens(x, scale)
    return (values.float() * scales).to(x.dtype)
