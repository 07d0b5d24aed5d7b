"""Launches of linear layers on packed weights, by GPU generation and rows of the batch; `matrix` explains them.

Rewritten by `python -m ops.bench.gpu.tune`; MEASURED says where an entry was measured. The others are reasoned.
"""

PACKED_LINEAR: dict[str, dict[int, dict[str, int]]] = {
    "HOPPER": {
        16: {"block_n": 128, "num_warps": 4, "num_stages": 4, "programs_per_multiprocessor": 2},
        32: {"block_n": 128, "num_warps": 4, "num_stages": 3, "programs_per_multiprocessor": 2},
        64: {"block_n": 128, "num_warps": 8, "num_stages": 3, "programs_per_multiprocessor": 1},
        128: {"block_n": 128, "num_warps": 8, "num_stages": 2, "programs_per_multiprocessor": 1},
    },
    "BLACKWELL": {
        16: {"block_n": 128, "num_warps": 4, "num_stages": 4, "programs_per_multiprocessor": 2},
        32: {"block_n": 64, "num_warps": 4, "num_stages": 3, "programs_per_multiprocessor": 2},
        64: {"block_n": 64, "num_warps": 4, "num_stages": 3, "programs_per_multiprocessor": 1},
    },
    "AMPERE": {
        16: {"block_n": 64, "num_warps": 4, "num_stages": 4, "programs_per_multiprocessor": 3},
        32: {"block_n": 64, "num_warps": 4, "num_stages": 3, "programs_per_multiprocessor": 2},
        64: {"block_n": 64, "num_warps": 8, "num_stages": 3, "programs_per_multiprocessor": 2},
    },
    "ADA": {
        16: {"block_n": 64, "num_warps": 4, "num_stages": 3, "programs_per_multiprocessor": 2},
        32: {"block_n": 64, "num_warps": 4, "num_stages": 3, "programs_per_multiprocessor": 2},
        64: {"block_n": 64, "num_warps": 8, "num_stages": 2, "programs_per_multiprocessor": 1},
    },
}
FUSED_ROWS: dict[str, int] = {"HOPPER": 512, "AMPERE": 256, "ADA": 256}
MEASURED: dict[str, str] = {}
