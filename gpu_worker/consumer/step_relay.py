"""Carries step outcomes from the engine's thread to the event loop, and holds the engine back when the loop is behind.

Without that, a loop that decodes and sends slower than the engine steps would fall behind without end. The engine
waits when more than a few outcomes lie here; it never waits for long, because the loop takes all of them at once.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable

from gpu_worker.engine.engine_thread import StepOutcome

MAX_WAITING_OUTCOMES = 4
# The engine goes on after that, so that it can be stopped while the loop is stuck.
_MAX_WAIT_S = 5.0


class StepRelay:
    """`deliver` is called on the engine's thread, everything else on the loop's.

    Attributes:
        handle: Called on the loop with each outcome, in order; set before the engine starts.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """Carry outcomes to `loop`."""
        self._loop = loop
        self.handle: Callable[[StepOutcome], None] = lambda outcome: None
        self._outcomes: deque[StepOutcome] = deque()
        self._has_room = threading.Event()

    def deliver(self, outcome: StepOutcome) -> None:
        """Pass an outcome on."""
        self._has_room.clear()
        self._outcomes.append(outcome)
        self._loop.call_soon_threadsafe(self._take_all)
        if len(self._outcomes) > MAX_WAITING_OUTCOMES:
            self._has_room.wait(_MAX_WAIT_S)

    def _take_all(self) -> None:
        while self._outcomes:
            self.handle(self._outcomes.popleft())
        self._has_room.set()
