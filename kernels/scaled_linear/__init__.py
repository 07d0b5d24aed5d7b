"""Linear layers on a GPU whose inputs are quantized to 8 bits, as their weights are."""

from kernels.scaled_linear.dispatch import scaled_linear
from kernels.scaled_linear.matrix import ScaledMatrix, scale_matrix

__all__ = ["ScaledMatrix", "scale_matrix", "scaled_linear"]
