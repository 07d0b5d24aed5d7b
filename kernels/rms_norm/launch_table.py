"""Launches of the kernel, by GPU generation; `triton_kernel` explains them.

Rewritten by `python -m ops.bench.gpu.tune`; MEASURED says where an entry was measured. The others are reasoned.
"""

RMS_NORM: dict[str, dict[str, int]] = {
    "HOPPER": {"elements_per_thread": 16, "max_warps": 16, "min_elements": 1024},
    "AMPERE": {"elements_per_thread": 16, "max_warps": 16, "min_elements": 1024},
    "ADA": {"elements_per_thread": 16, "max_warps": 16, "min_elements": 1024},
}
MEASURED: dict[str, str] = {}
