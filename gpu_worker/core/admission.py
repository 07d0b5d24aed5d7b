"""Who starts, and who is preempted for that.

Admission is strictly in order of lane, priority and arrival: a sequence starts when it fits the pools and there is a
slot. Batch sequences are admitted only while no interactive one waits, and are preempted at once when one needs their
slot or their blocks. Nobody is preempted while a step is in flight.
"""

from __future__ import annotations

from operator import attrgetter

from gpu_worker.core.live_sequences import LiveSequences
from gpu_worker.core.scheduler_config import SchedulerConfig
from gpu_worker.core.sequence import Sequence, SequenceStatus
from gpu_worker.core.sequence_blocks import SequenceBlocks
from gpu_worker.core.waiting_queue import WaitingQueue


class Admission:
    """Moves sequences between the waiting queues and the running set.

    Attributes:
        num_preemptions: Sequences that were preempted so far, each time.
    """

    def __init__(self, config: SchedulerConfig, blocks: SequenceBlocks, live: LiveSequences) -> None:
        """Admit to these blocks."""
        self._config = config
        self._blocks = blocks
        self._live = live
        self.num_preemptions = 0

    def admit_interactive(self, now: float) -> bool:
        """Start waiting interactive sequences in order, as long as this step has tokens and the pool has blocks.

        Returns:
            False when somebody would have to be preempted while a step is in flight.
        """
        queue, running = self._live.waiting["interactive"], self._live.running
        if not queue or (len(running) >= self._config.max_num_seqs and not running.num_batch):
            return True
        num_tokens_left = self._config.max_num_batched_tokens - len(running.decoding["interactive"])
        num_tokens_left -= sum([s.num_uncomputed_tokens for s in running.catching_up["interactive"].values()])
        while num_tokens_left > 0 and (sequence := queue.peek()) is not None:
            has_room = self.make_room(sequence)
            if not has_room:
                return has_room is not None
            self.start(queue, now)
            num_tokens_left -= sequence.num_uncomputed_tokens
        return True

    def make_room(self, sequence: Sequence) -> bool | None:
        """Say whether a waiting sequence can start, after preempting batch sequences for it if need be.

        Returns:
            None when somebody would have to be preempted while a step is in flight.
        """
        if self.fits(sequence):
            return True
        victims = self._victims(sequence)
        if victims and self._live.in_flight:
            return None
        while victims:
            self.preempt(victims.pop())
            if self.fits(sequence):
                return True
        return False

    def fits(self, sequence: Sequence) -> bool:
        """Say whether a waiting sequence can start beside those that run."""
        num_running = len(self._live.running)
        if num_running == 0 and not self._live.in_flight:
            return True
        return num_running < self._config.max_num_seqs and self._blocks.fits(sequence)

    def start(self, queue: WaitingQueue, now: float) -> Sequence:
        """Start the first sequence of a queue, which fits."""
        sequence = queue.pop()
        self._blocks.admit(sequence)
        sequence.status = SequenceStatus.RUNNING
        if sequence.scheduled_at is None:
            sequence.scheduled_at = now
        self._live.running.add(sequence)
        return sequence

    def preempt(self, sequence: Sequence) -> None:
        """Take a running sequence out, which no step in flight names; it waits at its old place."""
        self._live.preempt(sequence)
        self.num_preemptions += 1

    def _victims(self, sequence: Sequence) -> list[Sequence]:
        """Return the running batch sequences behind it, best first, if preempting them makes room; else none."""
        behind = [other for other in self._live.running.batch() if other.order > sequence.order]
        victims = sorted(behind, key=attrgetter("order"))
        return victims if self._blocks.would_fit_without(sequence, victims) else []
