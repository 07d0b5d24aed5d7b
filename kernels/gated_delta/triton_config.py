"""How the kernels of the gated delta rule are launched, and what is common to their inputs."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

from kernels.gated_delta.launch_table import GATED_DELTA
from kernels.gpu_config import Gpu, GpuGeneration

MIN_CHUNKED_LEN = 16
"""Tokens of a sequence from which on chunks are used: below, a token after the other is less work."""


@dataclass(frozen=True, slots=True)
class DeltaConfig:
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


_CONFIGS = MappingProxyType({GpuGeneration[name]: DeltaConfig(**entry) for name, entry in GATED_DELTA.items()})


def config_for(gpu: Gpu) -> DeltaConfig:
    """Return the launches for a GPU."""
    return _CONFIGS[gpu.generation]
