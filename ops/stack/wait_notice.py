"""A word for who waits: what a command waits for, once that takes longer than a moment."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from shared.audit import servers_in

QUIET_S = 2.0
EVERY_S = 5.0
T = TypeVar("T")


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
