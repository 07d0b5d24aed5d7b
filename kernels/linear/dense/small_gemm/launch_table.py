"""Launches of the small-batch linear layer, by GPU generation and rows of the batch; `config` explains them.

Reasoned, not measured yet: `python -m ops.bench.gpu.tune` compares others.
"""

from kernels.gpu_config import Rows

FIELDS = "block_n block_k num_warps num_stages programs_per_multiprocessor"
SMALL_GEMM: dict[str, Rows] = {
    "HOPPER": {16: (64, 128, 4, 5, 2), 32: (64, 128, 4, 4, 2), 64: (64, 128, 4, 3, 2)},
    "AMPERE": {16: (64, 64, 4, 6, 2), 32: (64, 64, 4, 5, 2), 64: (64, 64, 4, 4, 2)},
    "ADA": {16: (64, 64, 4, 4, 2), 32: (64, 64, 4, 3, 2), 64: (64, 64, 4, 2, 2)},
}
PREFERRED: dict[str, dict[tuple[int, int], int]] = {}
