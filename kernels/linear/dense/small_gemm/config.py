"""Launches of the small-batch linear layer for each GPU generation, and the products it is preferred for."""

from __future__ import annotations

import torch

from kernels.gpu_config import Gpu, GpuGeneration
from kernels.linear.dense.small_gemm.launch_table import FIELDS, PREFERRED, SMALL_GEMM
from kernels.linear.product_launch import MAX_SPLITS, MIN_BLOCK_N, ProductLaunch, read_launches, splits_of

MAX_ROWS = 64
# Wider results have tiles enough without a split.
MAX_OUT_FEATURES = 65_536
_WEIGHT_BYTES = 2
# A multiprocessor of a Hopper GPU needs some 64 KB in flight to keep the memory busy: up to 16 rows it has twice that.
_LAUNCHES = read_launches(FIELDS, SMALL_GEMM)
# (out_features, in_features) to the largest number of rows up to which the kernel was measured ahead of cuBLAS, by
# `python -m ops.bench.gpu.tune`. cuBLAS does all others.
_PREFERRED = {GpuGeneration[name]: products for name, products in PREFERRED.items()}


def small_gemm_launch(generation: GpuGeneration, num_rows: int) -> ProductLaunch:
    """Return the launch for a number of rows, at most `MAX_ROWS`."""
    return next(launch for launch in _LAUNCHES[generation] if num_rows <= launch.block_m)


def is_preferred(generation: GpuGeneration, num_rows: int, out_features: int, in_features: int) -> bool:
    """Return True for products that the kernel does faster than cuBLAS."""
    return num_rows <= _PREFERRED.get(generation, {}).get((out_features, in_features), 0)


def small_gemm_splits(launch: ProductLaunch, gpu: Gpu, out_features: int, in_features: int) -> int:
    """Return into how many parts the input features are divided."""
    if out_features > MAX_OUT_FEATURES:
        return 1
    weight_bytes = _WEIGHT_BYTES * out_features * in_features
    return splits_of(launch, gpu, out_features, -(-in_features // launch.block_k), weight_bytes)


class SmallGemmWorkspace:
    """Device memory in which the programs of one product meet. Made once, used by one stream at a time.

    Partial results of split products, and how many have arrived for each block of the result.

    The kernel leaves the counters as it found them, at zero, so nothing has to be cleared between launches and a
    workspace can be part of a CUDA graph.

    Attributes:
        counters: `[MAX_OUT_FEATURES / MIN_BLOCK_N]` int32.
        partials: `[MAX_SPLITS * max_rows * MAX_OUT_FEATURES]` float32.
    """

    def __init__(
        self, device: torch.device, max_rows: int = MAX_ROWS, max_out_features: int = MAX_OUT_FEATURES
    ) -> None:
        self.counters = torch.zeros(-(-max_out_features // MIN_BLOCK_N), dtype=torch.int32, device=device)
        self.partials = torch.empty(MAX_SPLITS * max_rows * max_out_features, dtype=torch.float32, device=device)
