"""Waiting for what nothing announces."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

Found = TypeVar("Found")


def wait_for(condition: Callable[[], Found], timeout_s: float = 30.0, why: Callable[[], object] | None = None) -> Found:
    """Return what a condition gives as soon as it is true; a failure says `why`, such as the end of a log."""
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not true within {timeout_s:g} s: {why() if why else found}"
        time.sleep(0.01)
    return found


async def until(condition: Callable[[], object], timeout_s: float = 30.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - no event announces it
            await asyncio.sleep(0.005)
