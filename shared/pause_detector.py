"""Notices that this process did not run for a while: whoever measures the silence of others must not count that time.

A process stands still when it is stopped, when the machine is overloaded or suspended, or when its event loop is
blocked. Messages of others wait unread meanwhile, so their silence proves nothing. Two clocks are compared with what a
periodic task expects, because the monotonic clock stands still too while the machine is suspended.
"""

from __future__ import annotations

import time
from collections.abc import Callable


def boot_time() -> float:
    """Return seconds since the machine started, time in suspension included, where the system has such a clock."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class PauseDetector:
    """Compares the time between two rounds of a periodic task with its interval.

    Attributes:
        lost_s: Monotonic seconds that the latest pause took: add them to the times at which others were last heard.
    """

    def __init__(
        self,
        interval_s: float,
        tolerance_s: float,
        monotonic: Callable[[], float] = time.monotonic,
        boot: Callable[[], float] = boot_time,
    ) -> None:
        """Expect a round every `interval_s`; one that is more than `tolerance_s` late follows a pause."""
        self._interval_s = interval_s
        self._tolerance_s = tolerance_s
        self._monotonic = monotonic
        self._boot = boot
        self._last = (monotonic(), boot())
        self.lost_s = 0.0

    def tick(self) -> bool:
        """Begin a round; say whether this process stood still since the last one."""
        now = (self._monotonic(), self._boot())
        late_s, late_boot_s = (there - here - self._interval_s for here, there in zip(self._last, now, strict=True))
        self._last = now
        if max(late_s, late_boot_s) <= self._tolerance_s:
            return False
        self.lost_s = max(0.0, late_s)
        return True
