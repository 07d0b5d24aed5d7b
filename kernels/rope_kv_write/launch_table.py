"""Launches of the kernel, by GPU generation; `triton_kernel` explains them.

Rewritten by `python -m ops.bench.gpu.tune`; MEASURED says where an entry was measured. The others are reasoned.
"""

ROPE_KV_WRITE: dict[str, dict[str, int]] = {
    "HOPPER": {"block_heads": 16, "num_warps": 4},
    "AMPERE": {"block_heads": 16, "num_warps": 4},
    "ADA": {"block_heads": 16, "num_warps": 4},
}
MEASURED: dict[str, str] = {}
