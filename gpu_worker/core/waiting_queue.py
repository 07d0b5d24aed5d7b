"""Sequences of one lane that wait for admission: best first, or in turns by tenant.

Removal from the middle (abort, expiry) leaves the entry in the heap and skips it later, so that no operation's cost
grows with the number waiting; entries left behind are swept out before they outnumber the live ones.
"""

from __future__ import annotations

import heapq

from gpu_worker.core.sequence import Sequence, SequenceStatus

_SWEEP_MINIMUM = 64


class WaitingQueue:
    """A heap by `Sequence.order` with lazy removal. Holds sequences that are WAITING or PREEMPTED."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int, float, int], Sequence]] = []
        self._num_live = 0
        self._num_tokens = 0

    def __len__(self) -> int:
        return self._num_live

    @property
    def num_tokens(self) -> int:
        """Tokens that the waiting sequences have to compute, prefix hits not counted."""
        return self._num_tokens

    def push(self, sequence: Sequence) -> None:
        """Add a sequence that is not in the queue."""
        heapq.heappush(self._heap, (sequence.order, sequence))
        self._num_live += 1
        self._num_tokens += sequence.num_tokens

    def peek(self) -> Sequence | None:
        """Return the sequence that goes first."""
        heap = self._heap
        while heap and heap[0][1].status is SequenceStatus.FINISHED:
            heapq.heappop(heap)
        return heap[0][1] if heap else None

    def pop(self) -> Sequence:
        """Remove the sequence that goes first."""
        sequence = self.peek()
        assert sequence is not None, "pop() from an empty queue"
        heapq.heappop(self._heap)
        self._num_live -= 1
        self._num_tokens -= sequence.num_tokens
        return sequence

    def discard(self, sequence: Sequence) -> None:
        """Take out a sequence of this queue that has just been finished."""
        assert sequence.status is SequenceStatus.FINISHED
        self._num_live -= 1
        self._num_tokens -= sequence.num_tokens
        if len(self._heap) > 2 * self._num_live + _SWEEP_MINIMUM:
            self._heap = [entry for entry in self._heap if entry[1].status is not SequenceStatus.FINISHED]
            heapq.heapify(self._heap)


class TenantQueues:
    """A queue for each tenant that has sequences waiting. Of equal priorities the tenant goes first that uses least.

    Attributes:
        used: What each tenant uses, as the admission keeps it while it starts sequences of several tenants.
    """

    def __init__(self) -> None:
        self._queues: dict[str, WaitingQueue] = {}
        self._num_live = 0
        self.used: dict[str, float] = {}

    def __len__(self) -> int:
        return self._num_live

    @property
    def num_tokens(self) -> int:
        """Tokens that the waiting sequences have to compute, prefix hits not counted."""
        return sum(queue.num_tokens for queue in self._queues.values())

    def push(self, sequence: Sequence) -> None:
        """Add a sequence that is not in the queue."""
        queue = self._queues.get(sequence.tenant)
        if queue is None:
            queue = self._queues[sequence.tenant] = WaitingQueue()
        queue.push(sequence)
        self._num_live += 1

    def peek(self) -> Sequence | None:
        """Return the sequence that goes first."""
        heads = [head for queue in self._queues.values() if (head := queue.peek()) is not None]
        if len(heads) < 2:
            return heads[0] if heads else None
        used = self.used
        return min(heads, key=lambda head: (head.order[:2], used.get(head.tenant, 0.0), head.order))

    def pop(self) -> Sequence:
        """Remove the sequence that goes first."""
        sequence = self.peek()
        assert sequence is not None, "pop() from an empty queue"
        self._queues[sequence.tenant].pop()
        self._count_out(sequence)
        return sequence

    def discard(self, sequence: Sequence) -> None:
        """Take out a sequence of this queue that has just been finished."""
        self._queues[sequence.tenant].discard(sequence)
        self._count_out(sequence)

    def _count_out(self, sequence: Sequence) -> None:
        self._num_live -= 1
        if not self._queues[sequence.tenant]:
            del self._queues[sequence.tenant]
