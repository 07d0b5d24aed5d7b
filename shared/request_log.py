"""One log line a request, up to a number of lines a second; the next line counts those left out.

Requests that failed, were refused or were slow have a number of their own, and so has batch work: the lines that an
operator looks for are written however many others there are.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Literal

REQUEST_LOG_HELP = (
    "Requests whose end is logged per second, a line each; as many again that failed, were refused or were slow, and "
    "as many jobs. 0 logs none. Lines left out are counted."
)
LOG_FORMAT_HELP = "How log lines are written: words and key=value pairs, or one JSON object a line."

DEFAULT_PER_S = 100.0
SLOW_TTFT_S = 5.0
SLOW_S = 60.0
"""A request is slow from this time to its first token, or in all."""

Kind = Literal["request", "problem", "batch"]


def is_slow(ttft_s: float | None, total_s: float | None) -> bool:
    """Return whether a request took long; None is a time that is not known."""
    return (ttft_s or 0.0) >= SLOW_TTFT_S or (total_s or 0.0) >= SLOW_S


class _Budget:
    """Lines of one kind: a burst may have as many at once as a second has."""

    __slots__ = ("_allowed", "_filled_at", "num_left_out")

    def __init__(self, max_per_s: float, now: float) -> None:
        self._allowed = max_per_s
        self._filled_at = now
        self.num_left_out = 0

    def take(self, max_per_s: float, now: float) -> bool:
        self._allowed = min(max(1.0, max_per_s), self._allowed + (now - self._filled_at) * max_per_s)
        self._filled_at = now
        if self._allowed < 1:
            self.num_left_out += 1
            return False
        self._allowed -= 1
        return True


class RequestLog:
    """Writes to one logger. Used from one thread."""

    def __init__(self, logger: logging.Logger, max_per_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._logger = logger
        self._max_per_s = max_per_s
        self._clock = clock
        now = clock()
        self._budgets: dict[Kind, _Budget] = {kind: _Budget(max_per_s, now) for kind in ("request", "problem", "batch")}

    def write(self, message: str, fields: Callable[[], Mapping[str, object]], kind: Kind = "request") -> None:
        """Log a line with what `fields` returns, or count it; fields that are None are left out."""
        budget = self._budgets[kind]
        if self._max_per_s <= 0 or not budget.take(self._max_per_s, self._clock()):
            return
        extra = {name: value for name, value in fields().items() if value is not None}
        if left_out := sum(each.num_left_out for each in self._budgets.values()):
            extra["left_out"] = left_out
            for each in self._budgets.values():
                each.num_left_out = 0
        self._logger.info(message, extra=extra)

    def close(self) -> None:
        """Log how many lines were left out since the last one."""
        if left_out := sum(each.num_left_out for each in self._budgets.values()):
            self._logger.info("requests without a line", extra={"left_out": left_out})
