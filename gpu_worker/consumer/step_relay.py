"""Carries step outcomes from the engine's thread to the event loop, and makes the engine wait where the loop is first.

The engine waits when more than a few outcomes lie here: a slow loop would fall behind without end. It also waits for a
moment when answers begin: it would keep the interpreter, and on a CPU the cores, while somebody waits for a token.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from gpu_worker.engine.engine_thread import StepOutcome

MAX_WAITING_OUTCOMES = 4
# The engine goes on after that, so that it can be stopped while the loop is stuck.
_MAX_WAIT_S = 5.0
# Outcomes of more events take the loop so long that the engine would lose more than the answers gain.
MAX_FIRST_EVENTS = 8
# A loop that is not there by then does something else that takes longer.
_MAX_FIRST_WAIT_S = 0.002


@dataclass(eq=False)
class StepRelay:
    """`deliver` is called on the engine's thread, everything else on the loop's."""

    _loop: asyncio.AbstractEventLoop
    _handle: Callable[[StepOutcome], None]
    _send: Callable[[], None]
    _outcomes: deque[StepOutcome] = field(default_factory=deque)
    _has_room: threading.Event = field(default_factory=threading.Event)

    def deliver(self, outcome: StepOutcome) -> None:
        """Pass an outcome on."""
        self._has_room.clear()
        self._outcomes.append(outcome)
        self._loop.call_soon_threadsafe(self._take_all)
        if len(self._outcomes) > MAX_WAITING_OUTCOMES:
            self._has_room.wait(_MAX_WAIT_S)
        elif _begins_answers(outcome):
            self._has_room.wait(_MAX_FIRST_WAIT_S)

    def _take_all(self) -> None:
        while self._outcomes:
            self._handle(self._outcomes.popleft())
        self._send()
        self._has_room.set()


def _begins_answers(outcome: StepOutcome) -> bool:
    """Return whether it has a first token, and little else."""
    events = outcome.events
    return len(events) <= MAX_FIRST_EVENTS and any(
        event.num_tokens_before == 0 and event.token_ids and event.finish is None for event in events
    )
