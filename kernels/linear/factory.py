"""Chooses for each matrix the fastest linear layer on its device, whatever form its weights have."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

import torch

from kernels.linear.cpu import pack_quantized_weight, quantized_linear
from kernels.linear.dense import make_dense_linear
from kernels.linear.dense.layers import NarrowingLinear
from kernels.linear.forms import (
    DenseWeight,
    GroupQuantizedWeight,
    QuantizedWeight,
    ScaledWeight,
    SplitWeight,
    WeightForm,
)
from kernels.linear.gpu_packed import pack_for_gpu, packed_linear
from kernels.linear.gpu_scaled import ScaledLinear, scale_for_gpu
from kernels.linear.linear import Linear, OperationLinear, SplitLinear
from kernels.linear.reference import form_linear_reference, round_inputs

_SHARE_FOR_COPIES = 0.5

_logger = logging.getLogger(__name__)


class CopyMemory:
    """The memory for dequantized copies: half of the free memory at the first product, after weights and KV cache."""

    def __init__(self, free_bytes: Callable[[], int]) -> None:
        self._free_bytes = free_bytes
        self._has_warned = False
        self.spare_bytes: int | None = None

    def take(self, num_bytes: int) -> bool:
        """Take memory for a copy if there is enough; the first time that there is not, log that steps will be slow."""
        if self.spare_bytes is None:
            self.spare_bytes = int(self._free_bytes() * _SHARE_FOR_COPIES)
        if num_bytes > self.spare_bytes:
            if not self._has_warned:
                self._has_warned = True
                _logger.warning("not enough memory to keep dequantized weights: each step dequantizes them, slowly")
            return False
        self.spare_bytes -= num_bytes
        return True


class DequantizedLinear:
    """A linear layer that becomes a dense one at its first call, when the type of its inputs is known.

    Where the copy does not fit, the formula dequantizes the matrix at every call. Workers call each layer before they
    are ready.
    """

    def __init__(
        self,
        form: QuantizedWeight,
        bias: torch.Tensor | None,
        make_dense: Callable[[torch.Tensor, torch.Tensor | None], Linear],
        memory: CopyMemory,
    ) -> None:
        self._form, self._bias, self._make_dense, self._memory = form, bias, make_dense, memory
        self._multiply: Callable[[torch.Tensor], torch.Tensor] | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply rows."""
        if self._multiply is None:
            self._multiply = self._chosen(x.dtype)
        return self._multiply(x)

    def to_float32(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply rows."""
        return self(x).float()

    def _chosen(self, dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
        form, (rows, columns) = self._form, self._form.shape
        if not self._memory.take(rows * columns * dtype.itemsize):
            return partial(form_linear_reference, form=form, bias=self._bias)
        dense = self._make_dense(form.dequantize().to(dtype), self._bias)
        if isinstance(form, ScaledWeight) and form.activation != "none":
            return lambda x: dense(round_inputs(x, form).to(dtype)).to(x.dtype)
        del self._form
        return lambda x: dense(x.to(dtype)).to(x.dtype)


class LinearFactory:
    """Makes the linear layers of a model, which share the memory for dequantized copies."""

    def __init__(self, free_bytes: Callable[[], int], dtype: torch.dtype = torch.float32) -> None:
        """Make nothing yet.

        Args:
            free_bytes: Says how much memory of the host is free.
            dtype: The type that the model computes in. Dequantized matrices on a GPU are kept in it from the start.
        """
        self.dtype = dtype
        self._copy_memory = CopyMemory(free_bytes)

    def make(self, weight: torch.Tensor | WeightForm, bias: torch.Tensor | None = None) -> Linear:
        """Choose the fastest layer for the weight's form, device and dtype; a plain matrix is dense.

        Shapes:
            weight: `[out_features, in_features]`
            bias: `[out_features]`
        """
        if isinstance(weight, SplitWeight):
            rows = [part.shape[0] for part in weight.parts]
            biases = [None] * len(rows) if bias is None else bias.split_with_sizes(rows)
            return SplitLinear([self.make(*pair) for pair in zip(weight.parts, biases, strict=True)])
        if isinstance(weight, DenseWeight):
            weight = weight.weight
        if isinstance(weight, torch.Tensor):
            return make_dense_linear(weight, bias)
        return self._quantized(weight, bias)

    def _quantized(self, form: QuantizedWeight, bias: torch.Tensor | None) -> Linear:
        if (panels := pack_quantized_weight(form, bias)) is not None:
            return OperationLinear(partial(quantized_linear, packed=panels))
        if (scaled := scale_for_gpu(form)) is not None:
            return ScaledLinear(scaled, bias)
        if (packed := pack_for_gpu(form)) is not None:
            return OperationLinear(partial(packed_linear, matrix=packed, bias=bias))
        if form.values.device.type == "cpu":
            return DequantizedLinear(form, bias, self.make, self._copy_memory)
        if isinstance(form, GroupQuantizedWeight):
            # Groups that the kernels do not take, as they may be cut: the formula would write them out at each call.
            return NarrowingLinear(form.dequantize().to(self.dtype), None if bias is None else bias.to(self.dtype))
        return OperationLinear(partial(form_linear_reference, form=form, bias=bias))
