"""A word for who waits: what a command waits for, once that takes longer than a moment."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from shared.audit import servers_in

QUIET_S = 2.0


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
