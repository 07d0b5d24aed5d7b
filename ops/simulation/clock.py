"""Virtual time: callbacks in the order of their times; those of one moment in the order in which they were added."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable

Callback = Callable[[], object]


class VirtualTimer:
    """A scheduled callback."""

    __slots__ = ("callback",)

    def __init__(self, callback: Callback) -> None:
        self.callback: Callback | None = callback

    def cancel(self) -> None:
        """Drop the callback."""
        self.callback = None


class VirtualClock:
    """Owns the time.

    Attributes:
        now: Seconds since the beginning.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._timers: list[tuple[float, int, VirtualTimer]] = []
        self._numbers = itertools.count()

    def time(self) -> float:
        """Return `now`, as a function of the clock."""
        return self.now

    def call_later(self, delay: float, callback: Callback) -> VirtualTimer:
        """Schedule a callback `delay` seconds from now."""
        return self.call_at(self.now + delay, callback)

    def call_at(self, at: float, callback: Callback) -> VirtualTimer:
        """Call a function when the virtual clock reaches a time."""
        timer = VirtualTimer(callback)
        heapq.heappush(self._timers, (at, next(self._numbers), timer))
        return timer

    def run(self, is_over: Callable[[], bool], until: float = float("inf")) -> None:
        """Run callbacks until `is_over()`, none is left, or the time is `until`."""
        timers = self._timers
        while timers and timers[0][0] <= until and not is_over():
            at, _, timer = heapq.heappop(timers)
            callback = timer.callback
            if callback is not None:
                self.now = max(self.now, at)
                timer.callback = None
                callback()
