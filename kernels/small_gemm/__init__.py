"""A linear layer for the few rows of a decode step: reference, Triton kernel, and the choice between them."""

from kernels.small_gemm.dispatch import small_gemm
from kernels.small_gemm.workspace import SmallGemmWorkspace

__all__ = ["SmallGemmWorkspace", "small_gemm"]
