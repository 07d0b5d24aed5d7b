"""Counts of values by size, for metrics: cheap to add to, readable at any time by reporters."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence


class Histogram:
    """Counts per bucket and their sum; `observe` is one bisection and three additions. One thread writes it."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count one value, which occurred `times` times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    @property
    def count(self) -> int:
        """How many values were counted."""
        return sum(self.counts)

    def buckets(self) -> list[tuple[str, float]]:
        """Return cumulative counts under their upper bounds, as Prometheus wants them."""
        return cumulative(self.bounds, self.counts)


def cumulative(bounds: Sequence[float], counts: Sequence[int]) -> list[tuple[str, float]]:
    """Return cumulative counts under their upper bounds; there is one count more than bounds."""
    labels = [*(str(float(bound)) for bound in bounds), "+Inf"]
    so_far = 0
    result: list[tuple[str, float]] = []
    for label, count in zip(labels, counts, strict=True):
        so_far += count
        result.append((label, so_far))
    return result
