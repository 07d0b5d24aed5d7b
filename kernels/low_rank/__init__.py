"""What adapters (LoRA) add to the product of a matrix, for the rows of a step that have one."""

from kernels.low_rank.cpu import AdapterMemory
from kernels.low_rank.dispatch import AdapterTable, make_adapter_table
from kernels.low_rank.form import LowRank, LowRankPart
from kernels.low_rank.rows import AdapterRows

__all__ = ["AdapterMemory", "AdapterRows", "AdapterTable", "LowRank", "LowRankPart", "make_adapter_table"]
