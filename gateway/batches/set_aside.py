"""Lines that are set aside: they cannot be published now, and other lines are published meanwhile.

Lines wait by their reason, such as a model without workers. One line of each reason is tried from time to time; once it
is published the others follow, many at a time.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from gateway.batches.input_lines import InputLine

_AGAIN_S = 1.0
_LINES_AT_ONCE = 32
_REASONS_AT_ONCE = 32

Attempt = tuple[InputLine, int]
"""A line without its bytes, and how often its jobs were renamed."""


@dataclass(slots=True)
class _Queue:
    due_at: float
    is_open: bool
    lines: deque[Attempt] = field(default_factory=deque)


class SetAside:
    """The lines of one batch that are set aside."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._queues: dict[str, _Queue] = {}

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._queues)

    @property
    def lines(self) -> Iterable[Attempt]:
        """All of them."""
        return (each for queue in self._queues.values() for each in queue.lines)

    def wait(self, place: InputLine, attempt: int, reason: str) -> None:
        """Set a line aside that could not be published."""
        queue = self._queues.setdefault(reason, _Queue(0.0, is_open=False))
        queue.due_at, queue.is_open = self._now() + _AGAIN_S, False
        queue.lines.append((place._replace(data=b""), attempt))

    def repeat(self, place: InputLine, attempt: int) -> None:
        """Set a line aside that is due at once: its jobs have to be renamed."""
        queue = self._queues.setdefault("", _Queue(0.0, is_open=True))
        queue.lines.append((place._replace(data=b""), attempt))

    def take_due(self) -> list[Attempt]:
        """Take the lines that are to be tried now. Those that cannot be published come back by `wait`."""
        now, due = self._now(), list[Attempt]()
        reasons = [reason for reason, queue in self._queues.items() if queue.due_at <= now]
        for reason in reasons[:_REASONS_AT_ONCE]:
            # The other reasons are before it the next time.
            queue = self._queues.pop(reason)
            num_lines = min(_LINES_AT_ONCE if queue.is_open else 1, len(queue.lines))
            due += [queue.lines.popleft() for _ in range(num_lines)]
            queue.is_open = True
            if queue.lines:
                self._queues[reason] = queue
        return due

    def take_all(self) -> list[Attempt]:
        """Take all lines."""
        lines = list(self.lines)
        self._queues.clear()
        return lines
