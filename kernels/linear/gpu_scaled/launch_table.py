"""Launches of linear layers on 8-bit weights and inputs, by GPU generation and rows; `matrix` explains them.

Reasoned, not measured yet: `python -m ops.bench.gpu.tune` compares others.
"""

from kernels.gpu_config import Rows

FIELDS = "block_n block_k num_warps num_stages programs_per_multiprocessor"
SCALED_LINEAR: dict[str, Rows] = {
    "HOPPER": {16: (64, 256, 4, 5, 2), 32: (64, 256, 4, 4, 2), 64: (64, 256, 4, 3, 2), 128: (128, 128, 8, 4, 1)},
    "AMPERE": {16: (64, 128, 4, 6, 2), 32: (64, 128, 4, 5, 2), 64: (64, 128, 4, 4, 2), 128: (128, 128, 8, 3, 1)},
    "ADA": {16: (64, 128, 4, 4, 2), 32: (64, 128, 4, 3, 2), 64: (64, 128, 4, 3, 2), 128: (128, 128, 8, 3, 1)},
}
KERNEL_ROWS: dict[str, int] = {"HOPPER": 64, "AMPERE": 64, "ADA": 64}
