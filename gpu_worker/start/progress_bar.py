"""Shows how far a start is: a bar that is drawn over itself on a terminal, else a log line every few seconds."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from typing import TextIO

from gpu_worker.execution.start_up import Stage

BAR_WIDTH = 30
REDRAW_S = 0.1
LOG_EVERY_S = 2.0

_TITLES = {
    Stage.COMPILE: "compiling kernels, once",
    Stage.LOAD: "loading weights",
    Stage.PROFILE: "measuring memory",
    Stage.CAPTURE: "capturing graphs",
}

_log = logging.getLogger(__name__)


class ProgressBar:
    """Shows one stage at a time; call it with a stage, the amount done, and the total."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._is_terminal = stream.isatty()
        self._stage: Stage | None = None
        self._began = (0.0, 0)
        self._shown = 0.0

    def __call__(self, stage: Stage, done: int, total: int) -> None:
        """Show progress, unless it was shown a moment ago; the end always is, on a terminal."""
        now = self._clock()
        if stage is not self._stage:
            self._stage, self._began = stage, (now, done)
            # Compiling always takes long; other stages are often over in a moment, and then leave no line.
            self._shown = -math.inf if self._is_terminal or stage is Stage.COMPILE else now
        is_over = done >= total
        if self._is_terminal and (is_over or now - self._shown >= REDRAW_S):
            self._draw(stage, done, total, now)
            self._shown = now
        elif not self._is_terminal and not is_over and now - self._shown >= LOG_EVERY_S:
            extra = {"done": _shown(stage, done), "of": _shown(stage, total), "percent": 100 * done // total}
            _log.info(_TITLES[stage], extra=extra)
            self._shown = now
        if is_over:
            self._stage = None

    def _draw(self, stage: Stage, done: int, total: int, now: float) -> None:
        filled = BAR_WIDTH * done // max(total, 1)
        bar = f"[{'#' * filled}{'.' * (BAR_WIDTH - filled)}]"
        began, done_then = self._began
        has_rate = stage is Stage.LOAD and now > began
        rate = f" {(done - done_then) / 1e9 / (now - began):.1f} GB/s" if has_rate else ""
        end = "\n" if done >= total else ""
        text = f"{_TITLES[stage]:<17}{bar} {_shown(stage, done)} of {_shown(stage, total)}{rate}"
        self._stream.write(f"\r\x1b[K{text}{end}")
        self._stream.flush()


def _shown(stage: Stage, count: int) -> str:
    return f"{count / 1e9:.2f} GB" if stage is Stage.LOAD else str(count)
