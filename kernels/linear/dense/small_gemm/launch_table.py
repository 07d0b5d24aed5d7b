"""Launches of the small-batch linear layer, by GPU generation and rows of the batch; `config` explains them.

Rewritten by `python -m ops.bench.gpu.tune`; MEASURED says where an entry was measured. The others are reasoned.
"""

SMALL_GEMM: dict[str, dict[int, dict[str, int]]] = {
    "HOPPER": {
        16: {"block_n": 64, "block_k": 128, "num_warps": 4, "num_stages": 5, "programs_per_multiprocessor": 2},
        32: {"block_n": 64, "block_k": 128, "num_warps": 4, "num_stages": 4, "programs_per_multiprocessor": 2},
        64: {"block_n": 64, "block_k": 128, "num_warps": 4, "num_stages": 3, "programs_per_multiprocessor": 2},
    },
    "AMPERE": {
        16: {"block_n": 64, "block_k": 64, "num_warps": 4, "num_stages": 6, "programs_per_multiprocessor": 2},
        32: {"block_n": 64, "block_k": 64, "num_warps": 4, "num_stages": 5, "programs_per_multiprocessor": 2},
        64: {"block_n": 64, "block_k": 64, "num_warps": 4, "num_stages": 4, "programs_per_multiprocessor": 2},
    },
    "ADA": {
        16: {"block_n": 64, "block_k": 64, "num_warps": 4, "num_stages": 4, "programs_per_multiprocessor": 2},
        32: {"block_n": 64, "block_k": 64, "num_warps": 4, "num_stages": 3, "programs_per_multiprocessor": 2},
        64: {"block_n": 64, "block_k": 64, "num_warps": 4, "num_stages": 2, "programs_per_multiprocessor": 2},
    },
}
PREFERRED: dict[str, dict[tuple[int, int], int]] = {}
MEASURED: dict[str, str] = {}
