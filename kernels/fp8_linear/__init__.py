"""Linear layers on float8_e4m3fn weights, with inputs that may be quantized as well: reference, and the choice."""

from kernels.fp8_linear.dispatch import fp8_linear
from kernels.fp8_linear.pack import pack_fp8
from kernels.fp8_linear.weight import SCALE_BLOCK, Fp8Weight

__all__ = ["SCALE_BLOCK", "Fp8Weight", "fp8_linear", "pack_fp8"]
