"""Launches of linear layers on packed weights, by GPU generation and rows of the batch; `matrix` explains them.

Reasoned, not measured yet: `python -m ops.bench.gpu.tune` compares others.
"""

from kernels.gpu_config import Rows

FIELDS = "block_n num_warps num_stages programs_per_multiprocessor"
PACKED_LINEAR: dict[str, Rows] = {
    "HOPPER": {16: (128, 4, 4, 2), 32: (128, 4, 3, 2), 64: (128, 8, 3, 1), 128: (128, 8, 2, 1)},
    "BLACKWELL": {16: (128, 4, 4, 2), 32: (64, 4, 3, 2), 64: (64, 4, 3, 1)},
    "AMPERE": {16: (64, 4, 4, 3), 32: (64, 4, 3, 2), 64: (64, 8, 3, 2)},
    "ADA": {16: (64, 4, 3, 2), 32: (64, 4, 3, 2), 64: (64, 8, 2, 1)},
}
FUSED_ROWS: dict[str, int] = {"HOPPER": 512, "AMPERE": 256, "ADA": 256}
