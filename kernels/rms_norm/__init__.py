"""Root-mean-square normalisation of rows, fused with the residual addition before it and the rounding behind it."""

from kernels.rms_norm.dispatch import rms_norm, rms_norm_rounded

__all__ = ["rms_norm", "rms_norm_rounded"]
