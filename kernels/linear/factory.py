"""Chooses for each matrix the fastest linear layer on its device, whatever form its weights have."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from kernels.linear.cpu import pack_quantized_weight, quantized_linear
from kernels.linear.cpu.dequantized import CopyMemory, DequantizedLinear
from kernels.linear.dense import make_dense_linear
from kernels.linear.forms import DenseWeight, QuantizedWeight, SplitWeight, WeightForm
from kernels.linear.gpu_packed import pack_for_gpu, packed_linear
from kernels.linear.gpu_scaled import ScaledLinear, scale_for_gpu
from kernels.linear.linear import Linear, OperationLinear, SplitLinear
from kernels.linear.reference import form_linear_reference


class LinearFactory:
    """Makes the linear layers of a model, which share the memory for dequantized copies."""

    def __init__(self, free_bytes: Callable[[], int]) -> None:
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
        return OperationLinear(partial(form_linear_reference, form=form, bias=bias))
