"""What a simulation counts: times by the million, in little memory."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Mapping

_RESOLUTION = 0.01
_SCALE = 1 / math.log1p(_RESOLUTION)


class TokenGaps:
    """Times between two tokens of a stream, as counts of equal ones within one percent."""

    def __init__(self, counts: Mapping[int, int] | None = None) -> None:
        self.counts: Counter[int] = Counter(counts or {})

    def add(self, gap_s: float, times: int) -> None:
        """Count a gap `times` times, once for each stream that had it."""
        self.counts[math.floor(math.log(gap_s) * _SCALE) if gap_s > 0 else -(10**6)] += times

    def add_all(self, counts: Mapping[int, int]) -> None:
        """Add the counts of another."""
        self.counts.update(counts)

    def percentile(self, percent: float) -> float:
        """Return the seconds below which `percent` of the gaps are; 0 without any."""
        left = self.counts.total() * percent / 100
        for place in sorted(self.counts):
            left -= self.counts[place]
            if left <= 0:
                return math.exp((place + 0.5) / _SCALE)
        return 0.0


def percentile(values: array[float] | list[float], percent: float) -> float:
    """Return the value below which `percent` of them are; 0 without any."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))] if ordered else 0.0
