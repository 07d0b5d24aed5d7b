"""What `headrace up` says: its own progress, and the warnings of its children."""

from __future__ import annotations

import contextlib
import re
import sys
from typing import TextIO

_WARNING = re.compile(rb"\b(WARN|WARNING|ERROR|CRITICAL|FATAL)\b|\[(WRN|ERR|FTL)\]|^Traceback |^\w*(Error|Exception): ")
# Passwords here are random, live as long as the process and are known to it alone; Redis here never forks to save.
_EXPECTED = re.compile(rb"Plaintext passwords detected|Memory overcommit must be enabled")
_MAX_LINE = 400


class Console:
    """Prints one line at a time to a stream, normally standard error, so that standard output holds only the result."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._is_terminal = self._stream.isatty()
        self._has_bar = False

    def say(self, who: str, text: str) -> None:
        """Print one line of progress."""
        try:
            print(f"{self._bar_removed()}{who:>10}  {text}", file=self._stream, flush=True)
        except OSError:
            # The terminal has gone; the system goes on, or is stopped by the signal that came with it.
            return

    def draw(self, who: str, bar: str) -> bool:
        """Draw a line over the one drawn before, until something is said; return False where that is not a terminal."""
        if self._is_terminal:
            with contextlib.suppress(OSError):
                print(f"{self._bar_removed()}{who:>10}  {bar}", end="", file=self._stream, flush=True)
            self._has_bar = True
        return self._is_terminal

    def _bar_removed(self) -> str:
        had_bar, self._has_bar = self._has_bar, False
        return "\r\x1b[K" if had_bar else ""

    def relay(self, who: str, line: bytes) -> None:
        """Print a line that a child has logged, if it is a warning or worse, and not one that means nothing here."""
        if _WARNING.search(line) and not _EXPECTED.search(line):
            self.say(who, line.decode(errors="replace")[:_MAX_LINE])
