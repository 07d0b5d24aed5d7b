"""Linear layers on quantized weights, on a CPU: by the compiled kernel, or by whatever operators torch has."""

from kernels.linear.cpu.cpu import QuantizedPanels, pack_quantized_weight, quantized_linear

__all__ = ["QuantizedPanels", "pack_quantized_weight", "quantized_linear"]
