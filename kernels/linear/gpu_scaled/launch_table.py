"""Launches of linear layers on 8-bit weights and inputs, by GPU generation and rows; `matrix` explains them.

Rewritten by `python -m ops.bench.gpu.tune`; MEASURED says where an entry was measured. The others are reasoned.
"""

SCALED_LINEAR: dict[str, dict[int, dict[str, int]]] = {
    "HOPPER": {
        16: {"block_n": 64, "block_k": 256, "num_warps": 4, "num_stages": 5, "programs_per_multiprocessor": 2},
        32: {"block_n": 64, "block_k": 256, "num_warps": 4, "num_stages": 4, "programs_per_multiprocessor": 2},
        64: {"block_n": 64, "block_k": 256, "num_warps": 4, "num_stages": 3, "programs_per_multiprocessor": 2},
        128: {"block_n": 128, "block_k": 128, "num_warps": 8, "num_stages": 4, "programs_per_multiprocessor": 1},
    },
    "AMPERE": {
        16: {"block_n": 64, "block_k": 128, "num_warps": 4, "num_stages": 6, "programs_per_multiprocessor": 2},
        32: {"block_n": 64, "block_k": 128, "num_warps": 4, "num_stages": 5, "programs_per_multiprocessor": 2},
        64: {"block_n": 64, "block_k": 128, "num_warps": 4, "num_stages": 4, "programs_per_multiprocessor": 2},
        128: {"block_n": 128, "block_k": 128, "num_warps": 8, "num_stages": 3, "programs_per_multiprocessor": 1},
    },
    "ADA": {
        16: {"block_n": 64, "block_k": 128, "num_warps": 4, "num_stages": 4, "programs_per_multiprocessor": 2},
        32: {"block_n": 64, "block_k": 128, "num_warps": 4, "num_stages": 3, "programs_per_multiprocessor": 2},
        64: {"block_n": 64, "block_k": 128, "num_warps": 4, "num_stages": 3, "programs_per_multiprocessor": 2},
        128: {"block_n": 128, "block_k": 128, "num_warps": 8, "num_stages": 3, "programs_per_multiprocessor": 1},
    },
}
KERNEL_ROWS: dict[str, int] = {"HOPPER": 64, "AMPERE": 64, "ADA": 64}
MEASURED: dict[str, str] = {}
