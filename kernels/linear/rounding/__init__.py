"""Inputs of linear layers, rounded to eight bits: by a kernel of their own, or at the end of the one before."""

from kernels.linear.rounding.dispatch import round_rows
from kernels.linear.rounding.rows import ROW_MULTIPLE, InputRounding, RoundedRows, Rows, common_rounding

__all__ = ["ROW_MULTIPLE", "InputRounding", "RoundedRows", "Rows", "common_rounding", "round_rows"]
