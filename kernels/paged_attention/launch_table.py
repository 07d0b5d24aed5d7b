"""Launches of the Triton paged attention kernels, by GPU generation and head size; `triton_config` explains them.

Reasoned, not measured yet: `python -m ops.bench.gpu.tune` compares others.
"""

from kernels.gpu_config import Rows

SPLIT_FIELDS = "block_n num_warps num_stages programs_per_multiprocessor"
SPLIT_ATTENTION: dict[str, Rows] = {
    "HOPPER": {64: (128, 4, 3, 4), 128: (64, 4, 3, 4), 256: (32, 4, 3, 4), 512: (32, 4, 3, 2)},
    "AMPERE": {64: (128, 4, 3, 4), 128: (64, 4, 3, 4), 256: (32, 4, 3, 4), 512: (16, 4, 3, 2)},
    "ADA": {64: (64, 4, 3, 4), 128: (32, 4, 3, 4), 256: (16, 4, 3, 4), 512: (16, 4, 1, 2)},
}
SPLIT_ATTENTION_8BIT: dict[str, Rows] = {
    "HOPPER": {64: (128, 4, 5, 4), 128: (64, 4, 5, 4), 256: (32, 4, 5, 4), 512: (32, 8, 3, 2)},
    "AMPERE": {64: (128, 4, 5, 4), 128: (64, 4, 5, 4), 256: (32, 4, 5, 4), 512: (16, 4, 3, 2)},
    "ADA": {64: (64, 4, 5, 4), 128: (32, 4, 5, 4), 256: (16, 4, 5, 4), 512: (16, 4, 1, 2)},
}
CHUNK_FIELDS = "block_m block_n num_warps num_stages programs_per_multiprocessor"
CHUNK_ATTENTION: dict[str, Rows] = {
    "HOPPER": {64: (128, 128, 8, 3, 2), 128: (128, 64, 8, 3, 2), 256: (128, 32, 8, 3, 2), 512: (32, 32, 8, 3, 1)},
    "AMPERE": {64: (128, 64, 8, 3, 2), 128: (128, 32, 8, 3, 2), 256: (64, 32, 8, 3, 2), 512: (32, 16, 8, 3, 1)},
    "ADA": {64: (64, 64, 4, 3, 2), 128: (64, 32, 4, 3, 2), 256: (32, 32, 4, 2, 2), 512: (16, 16, 4, 1, 1)},
}
