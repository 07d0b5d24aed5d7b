"""How the Triton kernels of a rule are launched: token by token for decodes, in chunks for prompts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from kernels.gpu_config import GpuGeneration, by_generation

MIN_CHUNKED_LEN = 16
"""Tokens of a sequence from which on chunks are used: below, a token after the other is less work."""

_TABLE_KEY_DIM = 128
"""The rows of a state that tables are for; with twice as many, programs have half the columns and tokens."""


@dataclass(frozen=True, slots=True)
class LaunchConfig:
    """An entry of a rule's table.

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

    def block_of(self, key_dim: int, *, is_chunked: bool) -> int:
        """Return the columns of a program whose states have so many rows."""
        return _scaled(self.chunk_block_value if is_chunked else self.block_value, key_dim)

    def chunk_of(self, key_dim: int) -> int:
        """Return the tokens of a chunk where states have so many rows."""
        return _scaled(self.chunk, key_dim)


def _scaled(size: int, key_dim: int) -> int:
    # Matrix products need sixteen.
    return max(16, size // max(1, key_dim // _TABLE_KEY_DIM))


def read_table(table: Mapping[str, Mapping[str, int]]) -> Mapping[GpuGeneration, LaunchConfig]:
    """Return the launches of a rule's table, by GPU generation."""
    return MappingProxyType({generation: LaunchConfig(**entry) for generation, entry in by_generation(table).items()})
