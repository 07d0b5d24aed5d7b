"""Multiplication of rows by a matrix that was packed once: reference, CPU kernel, and the choice."""

from kernels.linear.dense.cpu import PackedWeight
from kernels.linear.dense.dispatch import linear, pack_weight

__all__ = ["PackedWeight", "linear", "pack_weight"]
