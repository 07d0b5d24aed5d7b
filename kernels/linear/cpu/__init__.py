"""Linear layers on quantized weights, on a CPU: by the compiled kernel, or by whatever operators torch has."""

from kernels.linear.cpu.cpu import QuantizedPanels
from kernels.linear.cpu.dispatch import KernelQuantizedLinear, pack_quantized_weight, quantized_linear

__all__ = ["KernelQuantizedLinear", "QuantizedPanels", "pack_quantized_weight", "quantized_linear"]
