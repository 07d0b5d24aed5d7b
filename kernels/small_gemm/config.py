"""Launch shapes of the small-batch linear layer for each GPU generation, and the products it is preferred for."""

from __future__ import annotations

from dataclasses import dataclass

from kernels.gpu_config import Gpu, GpuGeneration
from kernels.small_gemm.launch_table import PREFERRED, SMALL_GEMM
from kernels.split_k import best_num_splits

MAX_ROWS = 64
# Wider results have tiles enough without a split.
MAX_OUT_FEATURES = 65_536


@dataclass(frozen=True, slots=True)
class SmallGemmConfig:
    """How the kernel is launched for up to some number of rows.

    Attributes:
        block_m: Rows of the batch, padded: the narrow side of the matrix instruction.
        block_n: Output features of a program: the wide side, 64 or more for wgmma.
        block_k: Input features read at once.
        num_warps: Of a program.
        num_stages: Readings in flight.
        programs_per_multiprocessor: How many fit at once, by their shared memory.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    programs_per_multiprocessor: int


# A multiprocessor of a Hopper GPU needs some 64 KB in flight to keep the memory busy: up to 16 rows it has twice that.
_CONFIGS = {
    GpuGeneration[name]: [SmallGemmConfig(num_rows, **entry) for num_rows, entry in entries.items()]
    for name, entries in SMALL_GEMM.items()
}
# (out_features, in_features) to the largest number of rows up to which the kernel was measured ahead of cuBLAS, by
# `python -m ops.bench.gpu.tune`. cuBLAS does all others.
_PREFERRED = {GpuGeneration[name]: products for name, products in PREFERRED.items()}


def small_gemm_config(generation: GpuGeneration, num_rows: int) -> SmallGemmConfig:
    """Return the launch shape for a number of rows, at most `MAX_ROWS`."""
    return next(config for config in _CONFIGS[generation] if num_rows <= config.block_m)


def is_preferred(generation: GpuGeneration, num_rows: int, out_features: int, in_features: int) -> bool:
    """Return True for products that the kernel does faster than cuBLAS."""
    return num_rows <= _PREFERRED.get(generation, {}).get((out_features, in_features), 0)


def choose_num_splits(config: SmallGemmConfig, gpu: Gpu, num_rows: int, out_features: int, in_features: int) -> int:
    """Return into how many parts the input features are divided."""
    if out_features > MAX_OUT_FEATURES:
        return 1
    num_tiles = -(-out_features // config.block_n)
    at_once = config.programs_per_multiprocessor * gpu.num_multiprocessors
    limit = -(-in_features // config.block_k)
    return best_num_splits(num_tiles, at_once, limit, 8 * num_rows / (2 * in_features))
