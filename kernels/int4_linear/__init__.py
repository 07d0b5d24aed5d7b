"""Linear layers on 4-bit integers that share scales and offsets in groups: reference, packing, and the choice."""

from kernels.int4_linear.dispatch import int4_linear
from kernels.int4_linear.pack import pack_int4
from kernels.int4_linear.weight import Int4Weight

__all__ = ["Int4Weight", "int4_linear", "pack_int4"]
