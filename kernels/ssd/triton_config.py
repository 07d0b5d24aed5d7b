"""How the kernels of Mamba-2's state update are launched."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

from kernels.gpu_config import Gpu, GpuGeneration
from kernels.ssd.launch_table import SSD

MIN_CHUNKED_LEN = 16
"""Tokens of a sequence from which on chunks are used: below, a token after the other is less work."""

_TABLE_STATE_SIZE = 128
"""The state size that blocks and chunks are for; with twice the rows they have half the columns and tokens."""


@dataclass(frozen=True, slots=True)
class SsdConfig:
    """How the kernels are launched.

    Attributes:
        block_value: Columns of a state that a program takes through its tokens one by one.
        num_warps: Of such a program.
        chunk: Tokens that are taken at once where sequences have many.
        chunk_block_value: Columns of a program that does so.
        chunk_num_warps: Of such a program.
    """

    block_value: int
    num_warps: int
    chunk: int
    chunk_block_value: int
    chunk_num_warps: int

    def block_of(self, state_rows: int, *, is_chunked: bool) -> int:
        """Return the columns of a program whose state has so many rows; matrix products need sixteen."""
        return _scaled(self.chunk_block_value if is_chunked else self.block_value, state_rows)

    def chunk_of(self, state_rows: int) -> int:
        """Return the tokens of a chunk where a state has so many rows."""
        return _scaled(self.chunk, state_rows)


def _scaled(size: int, state_rows: int) -> int:
    return max(16, size // max(1, state_rows // _TABLE_STATE_SIZE))


_CONFIGS = MappingProxyType({GpuGeneration[name]: SsdConfig(**entry) for name, entry in SSD.items()})


def config_for(gpu: Gpu) -> SsdConfig:
    """Return the launches for a GPU."""
    return _CONFIGS[gpu.generation]
