"""The compiled CPU kernel of linear layers on quantized weights. Its oracles are the references of their operations."""

from kernels.quantized_linear.cpu import PackedQuantizedWeight
from kernels.quantized_linear.dispatch import pack_quantized_weight, quantized_linear
from kernels.quantized_linear.layout import QuantizedWeight

__all__ = ["PackedQuantizedWeight", "QuantizedWeight", "pack_quantized_weight", "quantized_linear"]
