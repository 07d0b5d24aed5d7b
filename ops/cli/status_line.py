"""The line on standard error that says how far a long command is."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable

REDRAW_S = 0.1
TELL_EVERY_S = 5.0


class StatusLine:
    """On a terminal a line that is drawn over itself; elsewhere a line every few seconds, none in the first of them."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._is_terminal = sys.stderr.isatty()
        self._every_s = REDRAW_S if self._is_terminal else TELL_EVERY_S
        self._shown_at = -math.inf if self._is_terminal else clock()

    def show(self, text: str) -> None:
        """Show a text, unless another one was shown a moment ago."""
        now = self._clock()
        if now - self._shown_at < self._every_s:
            return
        self._shown_at = now
        if self._is_terminal:
            width = os.get_terminal_size(sys.stderr.fileno()).columns
            print(f"\r\x1b[K{text[: width - 1]}", end="", file=sys.stderr, flush=True)
        else:
            print(text, file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Remove the line from a terminal."""
        if self._is_terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
