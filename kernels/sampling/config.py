"""Launch shapes of the sampling kernels, one set for each GPU generation."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kernels.gpu_config import GpuGeneration


@dataclass(frozen=True, slots=True)
class SamplingConfig:
    """What a launch is made of.

    Attributes:
        tile: Tokens whose statistics are kept together, and that are read or skipped together.
        tiles: Tiles that one program of the kernels over (row, group of tiles) reads.
        threshold_rows, threshold_tiles: Tiles that the threshold kernel reads at once are the product of both.
        pivots: Keys that one reading compares with.
        stages: Readings in flight in the threshold kernel.
        capacity: Keys that fit on the list of a row.
        statistics_warps, threshold_warps, draw_warps: Warps of a program.
    """

    tile: int
    tiles: int
    threshold_rows: int
    threshold_tiles: int
    pivots: int
    stages: int
    capacity: int
    statistics_warps: int
    threshold_warps: int
    draw_warps: int


# The kernels are bound by memory alone; generations differ in how much must be in flight, and in registers. Reasoned:
# `python -m ops.bench.gpu.tune` compares others.
_DATACENTER = SamplingConfig(
    tile=256,
    tiles=16,
    threshold_rows=4,
    threshold_tiles=4,
    pivots=4,
    stages=4,
    capacity=2048,
    statistics_warps=4,
    threshold_warps=8,
    draw_warps=4,
)
_OTHERS = replace(_DATACENTER, tiles=8, threshold_rows=2, stages=3)


def sampling_config(generation: GpuGeneration) -> SamplingConfig:
    """Return the launch for a generation."""
    return _DATACENTER if generation.is_datacenter else _OTHERS
