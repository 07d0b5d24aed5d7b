"""Launches of the Triton paged attention kernels, by GPU generation and head size; `triton_config` explains them.

Rewritten by `python -m ops.bench.gpu.tune`; MEASURED says where an entry was measured. The others are reasoned.
"""

SPLIT_ATTENTION: dict[str, dict[int, dict[str, int]]] = {
    "HOPPER": {
        64: {"block_n": 128, "num_warps": 4, "num_stages": 3, "programs_per_multiprocessor": 4},
        128: {"block_n": 64, "num_warps": 4, "num_stages": 3, "programs_per_multiprocessor": 4},
        256: {"block_n": 32, "num_warps": 4, "num_stages": 3, "programs_per_multiprocessor": 4},
        512: {"block_n": 32, "num_warps": 4, "num_stages": 3, "programs_per_multiprocessor": 2},
    },
    "AMPERE": {
        64: {"block_n": 128, "num_warps": 4, "num_stages": 3, "programs_per_multiprocessor": 4},
        128: {"block_n": 64, "num_warps": 4, "num_stages": 3, "programs_per_multiprocessor": 4},
        256: {"block_n": 32, "num_warps": 4, "num_stages": 3, "programs_per_multiprocessor": 4},
        512: {"block_n": 16, "num_warps": 4, "num_stages": 3, "programs_per_multiprocessor": 2},
    },
    "ADA": {
        64: {"block_n": 64, "num_warps": 4, "num_stages": 3, "programs_per_multiprocessor": 4},
        128: {"block_n": 32, "num_warps": 4, "num_stages": 3, "programs_per_multiprocessor": 4},
        256: {"block_n": 16, "num_warps": 4, "num_stages": 3, "programs_per_multiprocessor": 4},
        512: {"block_n": 16, "num_warps": 4, "num_stages": 1, "programs_per_multiprocessor": 2},
    },
}
SPLIT_ATTENTION_8BIT: dict[str, dict[int, dict[str, int]]] = {
    "HOPPER": {
        64: {"block_n": 128, "num_warps": 4, "num_stages": 5, "programs_per_multiprocessor": 4},
        128: {"block_n": 64, "num_warps": 4, "num_stages": 5, "programs_per_multiprocessor": 4},
        256: {"block_n": 32, "num_warps": 4, "num_stages": 5, "programs_per_multiprocessor": 4},
        512: {"block_n": 32, "num_warps": 8, "num_stages": 3, "programs_per_multiprocessor": 2},
    },
    "AMPERE": {
        64: {"block_n": 128, "num_warps": 4, "num_stages": 5, "programs_per_multiprocessor": 4},
        128: {"block_n": 64, "num_warps": 4, "num_stages": 5, "programs_per_multiprocessor": 4},
        256: {"block_n": 32, "num_warps": 4, "num_stages": 5, "programs_per_multiprocessor": 4},
        512: {"block_n": 16, "num_warps": 4, "num_stages": 3, "programs_per_multiprocessor": 2},
    },
    "ADA": {
        64: {"block_n": 64, "num_warps": 4, "num_stages": 5, "programs_per_multiprocessor": 4},
        128: {"block_n": 32, "num_warps": 4, "num_stages": 5, "programs_per_multiprocessor": 4},
        256: {"block_n": 16, "num_warps": 4, "num_stages": 5, "programs_per_multiprocessor": 4},
        512: {"block_n": 16, "num_warps": 4, "num_stages": 1, "programs_per_multiprocessor": 2},
    },
}
CHUNK_ATTENTION: dict[str, dict[int, dict[str, int]]] = {
    "HOPPER": {
        64: {"block_m": 128, "block_n": 128, "num_warps": 8, "num_stages": 3, "programs_per_multiprocessor": 2},
        128: {"block_m": 128, "block_n": 64, "num_warps": 8, "num_stages": 3, "programs_per_multiprocessor": 2},
        256: {"block_m": 128, "block_n": 32, "num_warps": 8, "num_stages": 3, "programs_per_multiprocessor": 2},
        512: {"block_m": 32, "block_n": 32, "num_warps": 8, "num_stages": 3, "programs_per_multiprocessor": 1},
    },
    "AMPERE": {
        64: {"block_m": 128, "block_n": 64, "num_warps": 8, "num_stages": 3, "programs_per_multiprocessor": 2},
        128: {"block_m": 128, "block_n": 32, "num_warps": 8, "num_stages": 3, "programs_per_multiprocessor": 2},
        256: {"block_m": 64, "block_n": 32, "num_warps": 8, "num_stages": 3, "programs_per_multiprocessor": 2},
        512: {"block_m": 32, "block_n": 16, "num_warps": 8, "num_stages": 3, "programs_per_multiprocessor": 1},
    },
    "ADA": {
        64: {"block_m": 64, "block_n": 64, "num_warps": 4, "num_stages": 3, "programs_per_multiprocessor": 2},
        128: {"block_m": 64, "block_n": 32, "num_warps": 4, "num_stages": 3, "programs_per_multiprocessor": 2},
        256: {"block_m": 32, "block_n": 32, "num_warps": 4, "num_stages": 2, "programs_per_multiprocessor": 2},
        512: {"block_m": 16, "block_n": 16, "num_warps": 4, "num_stages": 1, "programs_per_multiprocessor": 1},
    },
}
MEASURED: dict[str, str] = {}
