"""Notices requests that this worker leaves to workers of another role, and that none of them takes.

Heartbeats say what a worker takes, and may lie, or its pulls may not arrive. NATS counts what it has delivered.
"""

from __future__ import annotations

import logging

from shared.consumers import Deliveries
from shared.disaggregation import TakenQueue

LEFT_S = 10.0
"""Seconds without a delivery after which waiting requests count as left."""
FIRST_HELP_S = 10.0
MOST_HELP_S = 60.0

_log = logging.getLogger(__name__)


class LeftQueues:
    """Owns since when each queue stands still, and until when this worker takes from all. Times are monotonic seconds.

    Each time that a queue stands still again soon after, this worker helps for twice as long: a worker that announces
    a role and takes nothing delays few requests.
    """

    def __init__(self) -> None:
        self._stands_since: dict[TakenQueue, tuple[int, float]] = {}
        self._help_s = 0.0
        self._helps_until: float | None = None

    def helps(self, now: float) -> bool:
        """Return whether this worker takes requests of all queues at present."""
        return self._helps_until is not None and now < self._helps_until

    def note(self, queue: TakenQueue, deliveries: Deliveries, now: float) -> None:
        """Take note of what NATS says of a queue that is left to others."""
        if not deliveries.num_waiting:
            self._stands_since.pop(queue, None)
            return
        num_delivered, since = self._stands_since.get(queue, (None, now))
        if num_delivered != deliveries.num_delivered:
            self._stands_since[queue] = deliveries.num_delivered, now
        elif now - since >= LEFT_S:
            self._begin_to_help(queue, now)

    def forget(self) -> None:
        """Start over: the observations so far are old."""
        self._stands_since.clear()

    def _begin_to_help(self, queue: TakenQueue, now: float) -> None:
        is_again = self._helps_until is not None and now - self._helps_until < MOST_HELP_S
        self._help_s = min(2 * self._help_s, MOST_HELP_S) if is_again else FIRST_HELP_S
        self._helps_until = now + self._help_s
        self.forget()
        _log.warning(
            "the workers that take from a queue by their heartbeats took nothing; this one does for a while",
            extra={"queue": queue, "help_s": self._help_s},
        )
