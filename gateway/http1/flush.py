"""Adaptive flush: one write per stream with something to send per flush, and flushes as rare as the machine is slow.

The kernel's send is most of what a streamed token costs, so coalescing is what raises the ceiling. The next flush waits
as long as the last one took: an idle gateway flushes each token at once, a saturated one spends half its time sending
and packs what has come meanwhile into one write per stream. It waits for a tenth of a second at most, because a flush
that took longer was interrupted by a pause of the process or of the machine, which says nothing about sending. A
stream's first token does not come here at all.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Protocol

MAX_DELAY_S = 0.1

_logger = logging.getLogger(__name__)


class Flushable(Protocol):
    """Something with bytes waiting to be written."""

    def flush(self) -> None:
        """Write what is waiting, at once."""


class Flusher:
    """Collects streams that have something to send, and flushes them together."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start idle."""
        self._loop = loop
        self._waiting: list[Flushable] = []
        self._not_before = 0.0
        self._is_scheduled = False

    def add(self, stream: Flushable) -> None:
        """Flush `stream` with the next flush. A stream adds itself once, when its buffer stops being empty."""
        self._waiting.append(stream)
        if not self._is_scheduled:
            self._is_scheduled = True
            delay = self._not_before - time.monotonic()
            if delay > 0:
                self._loop.call_later(delay, self._flush)
            else:
                self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        # Not `loop.time()`: uvloop computes that once per loop iteration, in milliseconds.
        started = time.monotonic()
        self._is_scheduled = False
        streams, self._waiting = self._waiting, []
        for stream in streams:
            try:
                stream.flush()
            except Exception:
                _logger.exception("a stream could not be flushed")
        ended = time.monotonic()
        self._not_before = ended + min(MAX_DELAY_S, ended - started)
