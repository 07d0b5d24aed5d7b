"""Linear layers on a GPU whose inputs are rounded to 8 bits, as their weights are."""

from kernels.linear.gpu_scaled.dispatch import ScaledLinear, scaled_linear
from kernels.linear.gpu_scaled.matrix import ScaledMatrix, scale_for_gpu, scale_matrix

__all__ = ["ScaledLinear", "ScaledMatrix", "scale_for_gpu", "scale_matrix", "scaled_linear"]
