"""Launches of the kernel, by GPU generation; `triton_kernel` explains them.

Rewritten by `python -m ops.bench.gpu.tune`; MEASURED says where an entry was measured. The others are reasoned.
"""

SILU_MUL: dict[str, dict[str, int]] = {
    "HOPPER": {"block": 1024, "num_warps": 4},
    "AMPERE": {"block": 1024, "num_warps": 4},
    "ADA": {"block": 1024, "num_warps": 4},
}
MEASURED: dict[str, str] = {}
