"""A linear layer for the few rows of a decode step: a Triton kernel, cuBLAS, and the choice between them."""

from kernels.linear.dense.small_gemm.config import SmallGemmWorkspace
from kernels.linear.dense.small_gemm.dispatch import can_be_preferred, small_gemm

__all__ = ["SmallGemmWorkspace", "can_be_preferred", "small_gemm"]
