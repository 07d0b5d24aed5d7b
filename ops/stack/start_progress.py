"""What a worker is doing while it starts, read from the lines that it logs."""

from __future__ import annotations

import re
from dataclasses import dataclass

_LINE = re.compile(
    r' INFO gpu_worker\.start\.progress_bar (?P<title>.+?) done=(?P<done>"[^"]*"|\S+) of=(?P<of>"[^"]*"|\S+) '
    r"percent=(?P<percent>\d+)"
)
_BAR_WIDTH = 30


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
    """Return the progress that a line of a worker's log tells of, or None where it tells of none."""
    found = _LINE.search(line.decode(errors="replace"))
    if found is None:
        return None
    return StartProgress(found["title"], found["done"].strip('"'), found["of"].strip('"'), int(found["percent"]))
