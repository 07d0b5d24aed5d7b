"""The compiled CPU kernel of linear layers on quantized weights. Its oracles are the references of their operations."""

from kernels.linear.cpu.cpu import PackedQuantizedWeight
from kernels.linear.cpu.dispatch import pack_quantized_weight, quantized_linear
from kernels.linear.cpu.layout import QuantizedWeight

__all__ = ["PackedQuantizedWeight", "QuantizedWeight", "pack_quantized_weight", "quantized_linear"]
