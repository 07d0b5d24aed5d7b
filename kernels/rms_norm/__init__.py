"""Root-mean-square normalisation of rows, fused with the residual addition before it."""

from kernels.rms_norm.dispatch import rms_norm

__all__ = ["rms_norm"]
