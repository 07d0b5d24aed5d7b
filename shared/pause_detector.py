"""Detects that this process was paused, so that the time is not counted as silence of its peers.

A process is paused when it is stopped, when the machine is overloaded or suspended, or when its event loop is blocked.
Messages from peers wait unread meanwhile. The interval of a periodic task is compared on two clocks, because the
monotonic clock stops while the machine is suspended.
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
        lost_s: Monotonic seconds that the latest pause took: add them to the times at which peers were last seen.
        busy_s: CPU seconds of this thread between the two rounds. Close to `lost_s`, its own code held the thread; far
            below, the machine gave it no time.
    """

    def __init__(
        self,
        interval_s: float,
        tolerance_s: float,
        monotonic: Callable[[], float] = time.monotonic,
        boot: Callable[[], float] = boot_time,
        cpu: Callable[[], float] = time.thread_time,
    ) -> None:
        self._interval_s = interval_s
        self._tolerance_s = tolerance_s
        self._monotonic = monotonic
        self._boot = boot
        self._cpu = cpu
        self._last_cpu = cpu()
        self._last = (monotonic(), boot())
        self.lost_s = 0.0
        self.busy_s = 0.0

    def tick(self) -> bool:
        """Begin a round; return whether this process was paused since the last one."""
        now = (self._monotonic(), self._boot())
        late_s, late_boot_s = (there - here - self._interval_s for here, there in zip(self._last, now, strict=True))
        self._last = now
        cpu = self._cpu()
        self._last_cpu, busy_s = cpu, cpu - self._last_cpu
        if max(late_s, late_boot_s) <= self._tolerance_s:
            return False
        self.lost_s = max(0.0, late_s)
        self.busy_s = busy_s
        return True
