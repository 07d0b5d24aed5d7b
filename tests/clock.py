"""A clock that only a test moves."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Clock:
    """Time that passes by hand, or by sleeping; a sleep takes `oversleep_s` longer than asked."""

    now: float = 100.0
    oversleep_s: float = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, duration_s: float) -> None:
        assert duration_s > 0
        self.now += duration_s + self.oversleep_s
