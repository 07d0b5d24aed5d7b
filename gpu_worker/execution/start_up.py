"""What a start consists of, how long each part took, and how far it is; it shows nothing itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum

Progress = Callable[[int, int], None]

_SHOWN_S = 0.05


class Stage(StrEnum):
    """Parts that take long enough to be watched."""

    COMPILE = "compile"
    LOAD = "load"
    PROFILE = "profile"
    CAPTURE = "capture"


Show = Callable[[Stage, int, int], None]


class StartUp:
    """The clock of one start, from when it was made."""

    def __init__(self, show: Show | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """Pass the progress of stages to `show`: files for compiling, bytes for loading, graphs for capturing."""
        self._show = show
        self._clock = clock
        self._started = clock()
        self.seconds: dict[Stage, float] = {}
        self.loaded_bytes = 0

    @contextmanager
    def stage(self, stage: Stage) -> Iterator[Progress]:
        """Time a stage; report its progress to the yielded function."""
        began = self._clock()

        def progress(done: int, total: int) -> None:
            if stage is Stage.LOAD:
                self.loaded_bytes = done
            if self._show is not None:
                self._show(stage, done, total)

        yield progress
        self.seconds[stage] = self.seconds.get(stage, 0.0) + self._clock() - began

    def summary(self) -> str:
        """Say how long the start took, with its parts."""
        # Kernels are compiled once per machine; later starts find them.
        shown = [stage for stage in self.seconds if stage is not Stage.COMPILE or self.seconds[stage] >= _SHOWN_S]
        parts = [f"{stage.value} {self.seconds[stage]:.1f} s{self._rate(stage)}" for stage in shown]
        return f"ready in {self._clock() - self._started:.1f} s" + (f": {', '.join(parts)}" if parts else "")

    def _rate(self, stage: Stage) -> str:
        seconds = self.seconds[stage]
        if stage is not Stage.LOAD or seconds <= 0 or not self.loaded_bytes:
            return ""
        return f" ({self.loaded_bytes / 1e9:.2f} GB at {self.loaded_bytes / seconds / 1e9:.1f} GB/s)"
