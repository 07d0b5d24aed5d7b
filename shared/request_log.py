"""One log line a request, and no more lines a second than the operator wants; the next one counts those left out."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping

REQUEST_LOG_HELP = "Requests whose end is logged per second, a line each; 0 logs none. Lines left out are counted."
LOG_FORMAT_HELP = "How log lines are written: words and key=value pairs, or one JSON object a line."


class RequestLog:
    """Writes to one logger; a burst may have as many lines at once as a second has. Used from one thread."""

    def __init__(self, logger: logging.Logger, max_per_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Write at most `max_per_s` lines a second."""
        self._logger = logger
        self._max_per_s = max_per_s
        self._clock = clock
        self._allowed = max_per_s
        self._filled_at = clock()
        self._num_left_out = 0

    def write(self, message: str, fields: Callable[[], Mapping[str, object]]) -> None:
        """Log a line with what `fields` returns, or count it; fields that are None are left out."""
        if not self._take():
            self._num_left_out += 1
            return
        extra = {name: value for name, value in fields().items() if value is not None}
        if self._num_left_out:
            extra["left_out"], self._num_left_out = self._num_left_out, 0
        self._logger.info(message, extra=extra)

    def _take(self) -> bool:
        if self._max_per_s <= 0:
            return False
        now = self._clock()
        most = max(1.0, self._max_per_s)
        self._allowed = min(most, self._allowed + (now - self._filled_at) * self._max_per_s)
        self._filled_at = now
        if self._allowed < 1:
            return False
        self._allowed -= 1
        return True
