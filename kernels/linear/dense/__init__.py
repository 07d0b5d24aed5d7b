"""Multiplication of rows by a matrix of plain numbers: on a CPU packed once, on a GPU as it is."""

from kernels.linear.dense.cpu import DensePanels, keeps_half, linear, pack_weight
from kernels.linear.dense.layers import HeadLinear, make_dense_linear, make_head_linear

__all__ = ["DensePanels", "HeadLinear", "keeps_half", "linear", "make_dense_linear", "make_head_linear", "pack_weight"]
