"""Launches of the products with experts, by GPU generation and rows of a program; `gpu` explains them.

Reasoned, from those of `kernels.linear`: none was measured yet. With 128 rows, a program that unpacks weights has more
sums than registers.
"""

from kernels.gpu_config import Rows

DENSE_FIELDS = "block_n block_k num_warps num_stages"
DENSE_EXPERTS: dict[str, Rows] = {
    "HOPPER": {16: (64, 128, 4, 4), 32: (64, 128, 4, 4), 64: (128, 64, 4, 4), 128: (128, 64, 8, 4)},
    "AMPERE": {16: (64, 64, 4, 5), 32: (64, 64, 4, 4), 64: (128, 64, 8, 3), 128: (128, 64, 8, 3)},
    "ADA": {16: (64, 64, 4, 4), 32: (64, 64, 4, 3), 64: (64, 64, 4, 3), 128: (128, 32, 8, 3)},
}
CODED_FIELDS = "block_n num_warps num_stages"
PACKED_EXPERTS: dict[str, Rows] = {
    "HOPPER": {16: (64, 4, 4), 32: (128, 4, 3), 64: (128, 8, 3)},
    "AMPERE": {16: (64, 4, 4), 32: (64, 4, 3), 64: (64, 8, 3)},
    "ADA": {16: (64, 4, 3), 32: (64, 4, 3), 64: (64, 8, 2)},
}
# Of float8 rows too, from more than `SCALED_ROWS` rows an expert on: fewer are bound by reading weights in any form.
SCALED_EXPERTS: dict[str, Rows] = {
    "HOPPER": {64: (128, 4, 4), 128: (128, 8, 4)},
    "BLACKWELL": {64: (64, 4, 4), 128: (64, 8, 4)},
    "ADA": {64: (64, 4, 3), 128: (64, 8, 3)},
}
SCALED_ROWS = 32
