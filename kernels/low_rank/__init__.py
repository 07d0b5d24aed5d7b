"""What adapters (LoRA) add to the product of a matrix, for the rows of a step that have one."""

from kernels.low_rank.adapter_rows import AdapterRows
from kernels.low_rank.cpu import join
from kernels.low_rank.dispatch import AdapterTable, make_adapter_table
from kernels.low_rank.form import LowRank, LowRankPart, whole_pages

__all__ = ["AdapterRows", "AdapterTable", "LowRank", "LowRankPart", "join", "make_adapter_table", "whole_pages"]
