"""Remembers cancellations, because the cancellation may arrive before the request, which is still in the queue."""

from __future__ import annotations

from collections import OrderedDict

MAX_REMEMBERED = 10_000
MEMORY_S = 120.0


class Cancellations:
    """Bounded in number and time: the oldest are forgotten first."""

    def __init__(self) -> None:
        """Begin without any."""
        self._by_id: OrderedDict[str, tuple[int | None, float]] = OrderedDict()

    def add(self, request_id: str, epoch: int | None, now: float) -> None:
        """Remember that attempts up to `epoch`, or all, are cancelled. `now` is monotonic seconds."""
        known = self._by_id.pop(request_id, None)
        if known is not None and (known[0] is None or epoch is None):
            epoch = None
        elif known is not None and known[0] is not None and epoch is not None:
            epoch = max(epoch, known[0])
        self._by_id[request_id] = (epoch, now)
        while len(self._by_id) > MAX_REMEMBERED or next(iter(self._by_id.values()))[1] < now - MEMORY_S:
            self._by_id.popitem(last=False)

    def covers(self, request_id: str, epoch: int, now: float) -> bool:
        """Say whether this attempt of a request is cancelled."""
        known = self._by_id.get(request_id)
        return known is not None and known[1] >= now - MEMORY_S and (known[0] is None or epoch <= known[0])
