"""Linear layers on quantized weights where no kernel of ours runs: in the forms that were measured fastest here.

torch has operators for some forms, each fast with some numbers of rows on some processors, and any matrix can be
dequantized once, which takes memory. What is fastest is measured once for a shape.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial

import torch

from kernels.linear.cpu.torch_operators.choice import RowForms, choose, describe
from kernels.linear.cpu.torch_operators.form import Form
from kernels.linear.cpu.torch_operators.int4 import Int4Form
from kernels.linear.cpu.torch_operators.int8 import Int8ConvertedForm, Int8Form
from kernels.linear.cpu.torch_operators.timing import FORMULA, measure
from kernels.linear.cpu.torch_operators.token_int8 import TokenInt8Form
from kernels.linear.forms import INT4, GroupQuantizedWeight, QuantizedWeight, ScaledWeight
from kernels.linear.linear import Linear
from kernels.linear.reference import form_linear_reference, round_inputs

logger = logging.getLogger(__name__)

_DENSE = "dense"
_SHARE_FOR_COPIES = 0.5


@dataclass(frozen=True, slots=True)
class PlainMatrix:
    """A quantized matrix as it was loaded.

    Attributes:
        form: Its values.
        dense: Makes a layer of a dense matrix.
    """

    form: QuantizedWeight
    dense: Callable[[torch.Tensor], Linear]

    def formula(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply in plain torch."""
        return form_linear_reference(x, self.form)

    def kind(self) -> tuple[Hashable, ...]:
        """Return what the time of a product depends on."""
        form = self.form
        if isinstance(form, GroupQuantizedWeight):
            return (f"{form.number.name} in groups of {form.group_size}", form.shape, form.input_order is None)
        name = str(form.values.dtype).removeprefix("torch.")
        return (f"{name} with inputs rounded: {form.activation}", form.shape, tuple(form.scales.shape))

    def largest_input(self) -> float:
        """Return the largest input that eight bits hold, where the checkpoint says what their scale is."""
        scale = self.form.activation_scale if isinstance(self.form, ScaledWeight) else None
        return 1.0 if scale is None else float(scale) * torch.iinfo(torch.int8).max

    def makers(self, dtype: torch.dtype, *, is_dense_allowed: bool) -> dict[str, Callable[[], Form]]:
        """Return what makes the forms that the matrix may have, by their names."""
        makers = self._operators(dtype)
        if is_dense_allowed:
            makers[_DENSE] = partial(self._dense, dtype)
        else:
            # Dequantizes at every call: only with many rows is it faster than an operator without vector instructions.
            makers[FORMULA] = lambda: self.formula
        return makers

    def _operators(self, dtype: torch.dtype) -> dict[str, Callable[[], Form]]:
        form = self.form
        if isinstance(form, GroupQuantizedWeight):
            return {"int4pack": partial(Int4Form, form, dtype)} if form.number is INT4 else {}
        if form.values.dtype is not torch.int8 or not form.has_row_scales:
            return {}
        if form.activation != "none":
            return {"qlinear": partial(TokenInt8Form, form)}
        return {"int8pack": partial(Int8Form, form, dtype), "converted": partial(Int8ConvertedForm, form, dtype)}

    def _dense(self, dtype: torch.dtype) -> Form:
        multiply, form = self.dense(self.form.dequantize().to(dtype)), self.form
        if isinstance(form, ScaledWeight) and form.activation != "none":
            return lambda x: multiply(round_inputs(x, form).to(x.dtype))
        return multiply


class Measurements:
    """What was measured, and the memory that is left for copies larger than what was loaded: half of what is free.

    Attributes:
        spare_bytes: That memory. None until the first product, which comes after weights and KV cache are allocated.
        names: The forms that were chosen, for each kind of matrix.
    """

    __slots__ = ("_free_bytes", "names", "spare_bytes")

    def __init__(self, free_bytes: Callable[[], int]) -> None:
        """Measure nothing yet; `free_bytes` says how much memory nobody uses."""
        self._free_bytes = free_bytes
        self.spare_bytes: int | None = None
        self.names: dict[tuple[Hashable, ...], tuple[str, ...]] = {}

    def forms(self, matrix: PlainMatrix, dtype: torch.dtype) -> RowForms:
        """Choose the forms of a matrix, and make them."""
        if self.spare_bytes is None:
            self.spare_bytes = int(self._free_bytes() * _SHARE_FOR_COPIES)
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


class MeasuredLinear:
    """A linear layer that takes its form at its first call.

    Only then are the type of its inputs known, and what memory all weights and the KV cache have left. Workers call it
    before they are ready.
    """

    __slots__ = ("_bias", "_dtype", "_forms", "_measurements", "_num_outputs", "_plain")

    def __init__(self, plain: PlainMatrix, bias: torch.Tensor | None, measurements: Measurements) -> None:
        """Hold the weights as they were loaded, until the first call."""
        self._plain: PlainMatrix | None = plain
        self._forms: RowForms | None = None
        self._dtype = torch.float32
        self._num_outputs = plain.form.shape[0]
        self._bias = bias
        self._measurements = measurements

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
        forms = self._measurements.forms(self._plain, dtype)
        self._dtype, self._forms, self._plain = dtype, forms, None
        return forms
