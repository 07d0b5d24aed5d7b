"""Log lines that others can cause: one a minute for each sender, which says how many were left out."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

# Senders that have a line of their own within one interval; all others share one.
_MAX_SENDERS = 100
_OTHERS = ""


@dataclass(slots=True)
class _Sender:
    logged_at: float
    num_left_out: int = 0


class LogLimit:
    """Writes to one logger. Used from one thread."""

    def __init__(
        self, logger: logging.Logger, interval_s: float = 60.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._logger = logger
        self._interval_s = interval_s
        self._clock = clock
        self._senders: dict[str, _Sender] = {}

    def warning(
        self,
        sender: str,
        message: str,
        *args: object,
        extra: Mapping[str, Any] | None = None,
        exc_info: BaseException | None = None,
    ) -> None:
        """Log a warning that `sender` has caused, or count it if one was logged within the interval."""
        num_left_out = self._admit(sender)
        if num_left_out is None:
            return
        if num_left_out:
            message, args = message + " (and %d more that were not logged)", (*args, num_left_out)
        self._logger.warning(message, *args, extra=extra, exc_info=exc_info)

    def _admit(self, sender: str) -> int | None:
        """Return how many lines were left out since the last one, or None when this one is left out too."""
        now = self._clock()
        known = self._senders.get(sender)
        if known is None and len(self._senders) >= _MAX_SENDERS:
            senders = self._senders.items()
            self._senders = {name: each for name, each in senders if now - each.logged_at < self._interval_s}
            if len(self._senders) >= _MAX_SENDERS:
                sender = _OTHERS
                known = self._senders.get(sender)
        if known is None:
            self._senders[sender] = _Sender(now)
            return 0
        if now - known.logged_at < self._interval_s:
            known.num_left_out += 1
            return None
        num_left_out, known.num_left_out, known.logged_at = known.num_left_out, 0, now
        return num_left_out
