"""Finds ranks that stand still: processes that live, and do not show it."""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from gpu_worker.execution.ranks.member import TICK_S
from gpu_worker.execution.ranks.process import RankProcess

FREEZE_S = 0.8
"""Time without a tick after which a rank counts as frozen. Eight are due in it."""
_STARVED_FACTOR = 12.5
"""Factor on that time for a rank that wants to run meanwhile: others have the cores then."""
_PAUSE_S = 0.4


_log = logging.getLogger(__name__)


def exit_within(seconds: float) -> threading.Timer:
    """End this process with status 1 if it has not ended by itself by then, unless the timer is cancelled."""
    timer = threading.Timer(seconds, _exit)
    timer.daemon = True
    timer.start()
    return timer


def _exit() -> None:
    _log.error("this process did not leave its step in time: it ends")
    with contextlib.suppress(OSError, ValueError):
        faulthandler.dump_traceback(sys.__stderr__ or 2)
    os._exit(1)


@dataclass(slots=True)
class _Stillness:
    """Observations of a rank: its ticks, the time since the last one, and the part of it without wanting a core."""

    ticks: int = -1
    silent_s: float = 0.0
    frozen_s: float = 0.0


class Watch:
    """Looks at all ranks, on a thread of its own."""

    def __init__(
        self,
        processes: Callable[[], list[RankProcess]],
        ticks: Callable[[int], int],
        on_frozen: Callable[[RankProcess, float], None],
    ) -> None:
        self._processes = processes
        self._ticks = ticks
        self._on_frozen = on_frozen
        self._is_closed = False
        self._silent_s: dict[int, float] = {}
        self._thread = threading.Thread(target=self._run, name="ranks", daemon=True)
        self._thread.start()

    def silent_s(self, rank: int) -> float:
        """Return for how long a rank has not shown that it runs."""
        return self._silent_s.get(rank, 0.0)

    def close(self) -> None:
        """Stop looking."""
        self._is_closed = True
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        seen: dict[RankProcess, _Stillness] = {}
        woke = time.monotonic()
        while not self._is_closed:
            time.sleep(TICK_S / 2)
            round_s, woke = time.monotonic() - woke, time.monotonic()
            for process in self._processes():
                ticks, still = self._ticks(process.rank), seen.setdefault(process, _Stillness())
                # Who was paused itself has missed ticks: it begins to wait anew.
                if ticks != still.ticks or round_s > _PAUSE_S:
                    still.ticks, still.silent_s, still.frozen_s = ticks, 0.0, 0.0
                    self._silent_s[process.rank] = 0.0
                    continue
                still.silent_s += round_s
                self._silent_s[process.rank] = still.silent_s
                if still.silent_s > 2 * TICK_S and not process.is_starved:
                    still.frozen_s += round_s
                if max(still.frozen_s + 2 * TICK_S, still.silent_s / _STARVED_FACTOR) > process.freeze_s:
                    self._on_frozen(process, still.silent_s)
