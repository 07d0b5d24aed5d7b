"""How the products with experts are launched on each GPU generation, for the rows that an expert gets on average."""

from __future__ import annotations

from dataclasses import dataclass

from kernels.gpu_config import GpuGeneration
from kernels.moe.launch_table import DENSE_EXPERTS, PACKED_EXPERTS


@dataclass(frozen=True, slots=True)
class ExpertLaunch:
    """The launch for up to so many rows an expert, on average.

    Attributes:
        block_m: Rows of a program, all of one expert, padded: the narrow side of the matrix instruction.
        block_n: Output features of a program: the wide side.
        num_warps: Of a program.
        num_stages: Readings in flight.
        block_k: Input features read at once; coded weights have those of their packing.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    block_k: int = 0


_DENSE, _PACKED = (
    {
        GpuGeneration[name]: [ExpertLaunch(rows, **entry) for rows, entry in entries.items()]
        for name, entries in table.items()
    }
    for table in (DENSE_EXPERTS, PACKED_EXPERTS)
)


def expert_launch(generation: GpuGeneration, num_rows: int, num_experts: int, *, is_packed: bool) -> ExpertLaunch:
    """Return the launch for rows that are shared out among experts: a tile twice the average wastes half at most."""
    launches = (_PACKED if is_packed else _DENSE)[generation]
    average = -(-num_rows // num_experts)
    return next((launch for launch in launches if average <= launch.block_m), launches[-1])


def max_blocks(num_rows: int, num_experts: int, block_m: int) -> int:
    """Return how many blocks of rows there can be, wherever rows go: an expert may have one partly full."""
    return (num_rows + min(num_rows, num_experts) * (block_m - 1)) // block_m
