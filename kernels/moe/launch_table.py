"""Launches of the products with experts, by GPU generation and rows of a program; `gpu` explains them.

All entries are reasoned, from those of `kernels.linear`: none was measured yet. With 128 rows, a program that unpacks
weights has more sums than registers.
"""

DENSE_EXPERTS: dict[str, dict[int, dict[str, int]]] = {
    "HOPPER": {
        16: {"block_n": 64, "block_k": 128, "num_warps": 4, "num_stages": 4},
        32: {"block_n": 64, "block_k": 128, "num_warps": 4, "num_stages": 4},
        64: {"block_n": 128, "block_k": 64, "num_warps": 4, "num_stages": 4},
        128: {"block_n": 128, "block_k": 64, "num_warps": 8, "num_stages": 4},
    },
    "AMPERE": {
        16: {"block_n": 64, "block_k": 64, "num_warps": 4, "num_stages": 5},
        32: {"block_n": 64, "block_k": 64, "num_warps": 4, "num_stages": 4},
        64: {"block_n": 128, "block_k": 64, "num_warps": 8, "num_stages": 3},
        128: {"block_n": 128, "block_k": 64, "num_warps": 8, "num_stages": 3},
    },
    "ADA": {
        16: {"block_n": 64, "block_k": 64, "num_warps": 4, "num_stages": 4},
        32: {"block_n": 64, "block_k": 64, "num_warps": 4, "num_stages": 3},
        64: {"block_n": 64, "block_k": 64, "num_warps": 4, "num_stages": 3},
        128: {"block_n": 128, "block_k": 32, "num_warps": 8, "num_stages": 3},
    },
}
PACKED_EXPERTS: dict[str, dict[int, dict[str, int]]] = {
    "HOPPER": {
        16: {"block_n": 64, "num_warps": 4, "num_stages": 4},
        32: {"block_n": 128, "num_warps": 4, "num_stages": 3},
        64: {"block_n": 128, "num_warps": 8, "num_stages": 3},
    },
    "AMPERE": {
        16: {"block_n": 64, "num_warps": 4, "num_stages": 4},
        32: {"block_n": 64, "num_warps": 4, "num_stages": 3},
        64: {"block_n": 64, "num_warps": 8, "num_stages": 3},
    },
    "ADA": {
        16: {"block_n": 64, "num_warps": 4, "num_stages": 3},
        32: {"block_n": 64, "num_warps": 4, "num_stages": 3},
        64: {"block_n": 64, "num_warps": 8, "num_stages": 2},
    },
}
# Of float8 rows too, from more than `SCALED_ROWS` rows an expert on: fewer are bound by reading weights in any form.
SCALED_EXPERTS: dict[str, dict[int, dict[str, int]]] = {
    "HOPPER": {
        64: {"block_n": 128, "num_warps": 4, "num_stages": 4},
        128: {"block_n": 128, "num_warps": 8, "num_stages": 4},
    },
    "BLACKWELL": {
        64: {"block_n": 64, "num_warps": 4, "num_stages": 4},
        128: {"block_n": 64, "num_warps": 8, "num_stages": 4},
    },
    "ADA": {
        64: {"block_n": 64, "num_warps": 4, "num_stages": 3},
        128: {"block_n": 64, "num_warps": 8, "num_stages": 3},
    },
}
SCALED_ROWS = 32
MEASURED: dict[str, str] = {}
