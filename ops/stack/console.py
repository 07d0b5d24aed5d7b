"""What `headrace up` says: its own progress, and the warnings of its children."""

from __future__ import annotations

import asyncio
import contextlib
import re
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TextIO, TypeVar

from shared.audit import servers_in

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


QUIET_S = 2.0
EVERY_S = 5.0
T = TypeVar("T")

_LINE = re.compile(
    r' INFO gpu_worker\.start\.progress_bar (?P<title>.+?) done=(?P<done>"[^"]*"|\S+) of=(?P<of>"[^"]*"|\S+) '
    r"percent=(?P<percent>\d+)"
)
_BAR_WIDTH = 30


@contextmanager
def told_of_nats(url: str, timeout_s: float, tell: Callable[[str], None]) -> Iterator[None]:
    """Tell, once, that NATS is waited for, if the block takes longer than a moment; credentials are left out."""
    words = f"waiting up to {timeout_s:g} s for NATS at {servers_in(url)}"
    notice = asyncio.get_running_loop().call_later(QUIET_S, tell, words)
    try:
        yield
    finally:
        notice.cancel()


async def told_while(
    work: Coroutine[Any, Any, T], waited_for: Callable[[], str], say: Callable[[str], None], every_s: float = EVERY_S
) -> T:
    """Do some work; every `every_s` seconds, say how long it has taken and what it is waiting for."""
    clock = asyncio.get_running_loop().time
    began = clock()
    working = asyncio.create_task(work)
    try:
        while not (await asyncio.wait({working}, timeout=every_s))[0]:
            say(f"waiting for {clock() - began:.0f} s: {waited_for()}")
        return working.result()
    finally:
        working.cancel()


@dataclass(frozen=True, slots=True)
class StartProgress:
    """One stage of a worker's start, and how far it is: `done` and `total` as people read them, and in percent."""

    title: str
    done: str
    total: str
    percent: int

    @property
    def text(self) -> str:
        """Say it in words."""
        return f"{self.title} ({self.done} of {self.total})"

    @property
    def bar(self) -> str:
        """Draw it."""
        filled = _BAR_WIDTH * self.percent // 100
        return f"{self.title}  [{'#' * filled}{'.' * (_BAR_WIDTH - filled)}] {self.done} of {self.total}"


def read_progress(line: bytes) -> StartProgress | None:
    """Return the progress that a line of a worker's log reports, or None if it reports none."""
    found = _LINE.search(line.decode(errors="replace"))
    if found is None:
        return None
    return StartProgress(found["title"], found["done"].strip('"'), found["of"].strip('"'), int(found["percent"]))
