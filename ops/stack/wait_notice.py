"""What a command waits for, told once that takes longer than a moment, and how far the start of a worker is."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from shared.audit import servers_in

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
    """Tell, once, that NATS is waited for, if the block takes longer than a moment; credentials are left out.

    Args:
        url: The servers.
        timeout_s: How long they are waited for.
        tell: Is given the words, from the running event loop.
    """
    words = f"waiting up to {timeout_s:g} s for NATS at {servers_in(url)}"
    notice = asyncio.get_running_loop().call_later(QUIET_S, tell, words)
    try:
        yield
    finally:
        notice.cancel()


async def told_while(
    work: Coroutine[Any, Any, T], waited_for: Callable[[], str], say: Callable[[str], None], every_s: float = EVERY_S
) -> T:
    """Do some work, and say every so often how long that has taken and what is waited for.

    Args:
        work: What is done. An error that it raises is raised here.
        waited_for: Says what the work waits for just now.
        say: Is given the words.
        every_s: Seconds between them.
    """
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
