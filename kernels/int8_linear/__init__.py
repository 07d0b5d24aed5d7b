"""Linear layers on 8-bit integers, in groups or with inputs that are quantized as well: reference, and the choice."""

from kernels.int8_linear.dispatch import int8_group_linear, int8_linear
from kernels.int8_linear.pack import pack_int8, pack_int8_groups
from kernels.int8_linear.weight import Int8GroupWeight, Int8Weight

__all__ = ["Int8GroupWeight", "Int8Weight", "int8_group_linear", "int8_linear", "pack_int8", "pack_int8_groups"]
