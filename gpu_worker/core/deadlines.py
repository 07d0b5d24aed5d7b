"""Which sequences have run out of time, without looking at those that have not."""

from __future__ import annotations

import heapq
from itertools import count

from gpu_worker.core.sequence import Sequence, SequenceStatus

_SWEEP_MINIMUM = 64


class Deadlines:
    """A heap of deadlines. Sequences that finish earlier stay in it until swept out or due."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Sequence]] = []
        self._tie_breaker = count()

    def watch(self, sequence: Sequence, num_live: int) -> None:
        """Watch a sequence that has a deadline; `num_live` unfinished sequences exist, this one included."""
        assert sequence.deadline is not None
        heapq.heappush(self._heap, (sequence.deadline, next(self._tie_breaker), sequence))
        if len(self._heap) > 2 * num_live + _SWEEP_MINIMUM:
            self._heap = [entry for entry in self._heap if entry[2].status is not SequenceStatus.FINISHED]
            heapq.heapify(self._heap)

    def pop_expired(self, now: float) -> list[Sequence]:
        """Remove and return the unfinished sequences whose deadline is not after `now`."""
        expired = []
        while self._heap and self._heap[0][0] <= now:
            sequence = heapq.heappop(self._heap)[2]
            if sequence.status is not SequenceStatus.FINISHED:
                expired.append(sequence)
        return expired
