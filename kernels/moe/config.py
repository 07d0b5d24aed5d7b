"""How the products with experts are launched on each GPU generation, for the rows that an expert gets on average."""

from __future__ import annotations

from kernels.gpu_config import GpuGeneration
from kernels.linear.product_launch import ProductLaunch, launch_for, read_launches
from kernels.moe.launch_table import DENSE_EXPERTS, PACKED_EXPERTS

_DENSE, _PACKED = read_launches(DENSE_EXPERTS), read_launches(PACKED_EXPERTS)


def expert_launch(generation: GpuGeneration, num_rows: int, num_experts: int, *, is_packed: bool) -> ProductLaunch:
    """Return the launch for rows that are shared out among experts; the rows of a program are all of one expert.

    A tile twice the average wastes half at most.
    """
    return launch_for((_PACKED if is_packed else _DENSE)[generation], -(-num_rows // num_experts))


def max_blocks(num_rows: int, num_experts: int, block_m: int) -> int:
    """Return how many blocks of rows there can be, wherever rows go: an expert may have one partly full."""
    return (num_rows + min(num_rows, num_experts) * (block_m - 1)) // block_m
