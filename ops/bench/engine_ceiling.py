"""What the machine can do at most: the rate at which its threads read memory that no cache holds."""

from __future__ import annotations

import time

import torch

_BYTES = 512 << 20
_ROUNDS = 7


def read_bandwidth() -> float:
    """Measure bytes per second of a sum over a large array, with torch's current number of threads; best of a few."""
    values = torch.ones(_BYTES // 4, dtype=torch.float32)
    best = float("inf")
    for _ in range(_ROUNDS):
        started = time.perf_counter()
        values.sum()
        best = min(best, time.perf_counter() - started)
    return _BYTES / best
