"""Launches of the sampling kernels, by GPU generation; `config` explains them.

Rewritten by `python -m ops.bench.gpu.tune`; MEASURED says where an entry was measured. The others are reasoned.
"""

SAMPLING: dict[str, dict[str, int]] = {
    "HOPPER": {
        "tile": 256,
        "tiles": 16,
        "threshold_rows": 4,
        "threshold_tiles": 4,
        "pivots": 4,
        "stages": 4,
        "capacity": 2048,
        "statistics_warps": 4,
        "threshold_warps": 8,
        "draw_warps": 4,
    },
    "AMPERE": {
        "tile": 256,
        "tiles": 8,
        "threshold_rows": 2,
        "threshold_tiles": 4,
        "pivots": 4,
        "stages": 3,
        "capacity": 2048,
        "statistics_warps": 4,
        "threshold_warps": 8,
        "draw_warps": 4,
    },
    "ADA": {
        "tile": 256,
        "tiles": 8,
        "threshold_rows": 2,
        "threshold_tiles": 4,
        "pivots": 4,
        "stages": 3,
        "capacity": 2048,
        "statistics_warps": 4,
        "threshold_warps": 8,
        "draw_warps": 4,
    },
}
MEASURED: dict[str, str] = {}
