"""Matrices in any form, packed for the compiled kernels of a CPU, dense and quantized alike."""

from __future__ import annotations

import ctypes

import torch

from kernels.cpu_library import DTYPE_NUMBERS, CpuLibrary
from kernels.cpu_structures import MatrixStructure, address_of
from kernels.linear.cpu.cpu import QuantizedPanels, input_layout, pack_quantized
from kernels.linear.dense.cpu import DensePanels, can_widen, pack
from kernels.linear.forms import DenseWeight, SplitWeight, WeightForm

PanelMatrix = DensePanels | QuantizedPanels


def pack_panels(
    library: CpuLibrary,
    form: WeightForm,
    dtype: torch.dtype,
    bias: torch.Tensor | None = None,
    *,
    is_gated: bool = False,
) -> PanelMatrix:
    """Pack a matrix; forms that no kernel knows become dense."""
    if isinstance(form, DenseWeight):
        weight = form.weight
        if dtype is not torch.float32 or not can_widen(weight.dtype, weight.shape[1]):
            weight = weight.to(dtype)
        return pack(library, weight, bias, is_gated=is_gated)
    if not isinstance(form, SplitWeight) and input_layout(form) is not None:
        return pack_quantized(library, form, bias, is_gated=is_gated)
    return pack(library, form.dequantize().to(dtype), bias, is_gated=is_gated)


def matrix_structure(packed: PanelMatrix) -> MatrixStructure:
    """Describe a matrix to the kernel; the structure holds addresses only."""
    if isinstance(packed, QuantizedPanels):
        return MatrixStructure(quantized=ctypes.addressof(packed.structure))
    bias = address_of(packed.bias)
    dtype = DTYPE_NUMBERS[packed.weight.dtype]
    return MatrixStructure(packed.weight.data_ptr(), bias, packed.num_inputs, packed.num_outputs, dtype)
