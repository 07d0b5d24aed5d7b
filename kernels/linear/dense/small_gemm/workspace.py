"""The memory that a small-batch linear layer works in; apart, because dispatch and kernel both need it."""

from __future__ import annotations

import torch

from kernels.linear.dense.small_gemm.config import MAX_OUT_FEATURES, MAX_ROWS
from kernels.linear.product_launch import MAX_SPLITS, MIN_BLOCK_N


class SmallGemmWorkspace:
    """Device memory in which the programs of one product meet. Made once, used by one stream at a time.

    Partial results of split products, and how many have arrived for each block of the result.

    The kernel leaves the counters as it found them, at zero, so nothing has to be cleared between launches and a
    workspace can be part of a CUDA graph.

    Attributes:
        counters: `[MAX_OUT_FEATURES / MIN_BLOCK_N]` int32.
        partials: `[MAX_SPLITS * max_rows * MAX_OUT_FEATURES]` float32.
    """

    __slots__ = ("counters", "partials")

    def __init__(
        self, device: torch.device, max_rows: int = MAX_ROWS, max_out_features: int = MAX_OUT_FEATURES
    ) -> None:
        self.counters = torch.zeros(-(-max_out_features // MIN_BLOCK_N), dtype=torch.int32, device=device)
        self.partials = torch.empty(MAX_SPLITS * max_rows * max_out_features, dtype=torch.float32, device=device)
