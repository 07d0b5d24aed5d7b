"""Sequences of one lane that wait for admission: those of a key best first, keys and tenants in turns.

Removal from the middle (abort, expiry) leaves the entry in the heap and skips it later, so that no operation's cost
grows with the number waiting; entries left behind are swept out before they outnumber the live ones.
"""

from __future__ import annotations

import heapq

from gpu_worker.core.sequence import Sequence, SequenceStatus
from gpu_worker.core.virtual_counters import VirtualCounters

_SWEEP_MINIMUM = 64


class WaitingQueue:
    """A heap by `Sequence.order` with lazy removal. Holds sequences that are WAITING or PREEMPTED.

    They have to compute `num_tokens` tokens, prefix hits not counted.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, float, int], Sequence]] = []
        self._num_live = 0
        self.num_tokens = 0

    def __len__(self) -> int:
        return self._num_live

    def push(self, sequence: Sequence) -> None:
        """Add a sequence that is not in the queue."""
        heapq.heappush(self._heap, (sequence.order, sequence))
        self._num_live += 1
        self.num_tokens += sequence.num_tokens

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
        self.num_tokens -= sequence.num_tokens
        return sequence

    def discard(self, sequence: Sequence) -> None:
        """Take out a sequence of this queue that has just been finished."""
        assert sequence.status is SequenceStatus.FINISHED
        self._num_live -= 1
        self.num_tokens -= sequence.num_tokens
        if len(self._heap) > 2 * self._num_live + _SWEEP_MINIMUM:
            self._heap = [entry for entry in self._heap if entry[1].status is not SequenceStatus.FINISHED]
            heapq.heapify(self._heap)


class FairQueue:
    """A queue for each key that has sequences waiting. The tenant served least goes first, then its key."""

    def __init__(self) -> None:
        self._queues: dict[tuple[str, str], WaitingQueue] = {}
        self._num_live = 0
        self.counters = VirtualCounters()

    def __len__(self) -> int:
        return self._num_live

    @property
    def num_tokens(self) -> int:
        """Tokens that the waiting sequences have to compute, prefix hits not counted."""
        return sum(queue.num_tokens for queue in self._queues.values())

    def push(self, sequence: Sequence) -> None:
        """Add a sequence that is not in the queue."""
        share = (sequence.tenant, sequence.key)
        queue = self._queues.get(share)
        if queue is None:
            queue = self._queues[share] = WaitingQueue()
        queue.push(sequence)
        self.counters.enter(sequence)
        self._num_live += 1

    def heads(self) -> list[Sequence]:
        """Return the first sequence of each key, best first."""
        heads = [head for queue in self._queues.values() if (head := queue.peek()) is not None]
        if len(heads) > 1:
            heads.sort(key=lambda head: (head.order[0], self.counters.standing(head), head.order))
        return heads

    def peek(self) -> Sequence | None:
        """Return the sequence that goes first."""
        heads = self.heads()
        return heads[0] if heads else None

    def take(self, head: Sequence) -> None:
        """Remove a sequence that is the first of its key."""
        taken = self._queues[head.tenant, head.key].pop()
        assert taken is head
        self._count_out(head)

    def discard(self, sequence: Sequence) -> None:
        """Take out a sequence of this queue that has just been finished."""
        self._queues[sequence.tenant, sequence.key].discard(sequence)
        self._count_out(sequence)

    def _count_out(self, sequence: Sequence) -> None:
        self._num_live -= 1
        self.counters.leave(sequence)
        if not self._queues[sequence.tenant, sequence.key]:
            del self._queues[sequence.tenant, sequence.key]
