"""What the next step computes: who grows, who starts, who is preempted, and how the token budget is shared out.

Moves sequences between the waiting queues and the running set; it never ends one. The rules are the scheduler's:

- Decodes go first, one token each; prompts share what is left of the token budget in order of lane, priority and
  arrival, so a long prompt never delays a running stream by more than the budget allows.
- Admission is strictly in that order too. Batch sequences are admitted only while no interactive one waits, and are
  preempted at once when one needs their slot or their blocks.
- When running sequences outgrow the pool, the last in that order is preempted: its blocks go back (findable as long
  as nobody reuses them), and it waits again at its old place and is recomputed.
"""

from __future__ import annotations

from operator import attrgetter

from gpu_worker.core.running_set import RunningSet
from gpu_worker.core.scheduler_config import SchedulerConfig
from gpu_worker.core.sequence import Sequence, SequenceStatus
from gpu_worker.core.sequence_blocks import SequenceBlocks
from gpu_worker.core.step import ScheduledSequence, StepPlan
from gpu_worker.core.waiting_queue import WaitingQueue
from shared.messages import Lane


class Planner:
    """Plans steps over queues, running set and blocks that it shares with the scheduler."""

    def __init__(
        self,
        config: SchedulerConfig,
        blocks: SequenceBlocks,
        waiting: dict[Lane, WaitingQueue],
        running: RunningSet,
    ) -> None:
        """Plan for these; `waiting` lists the lanes in the order in which they are served."""
        self._config = config
        self._blocks = blocks
        self._waiting = waiting
        self._running = running
        self.num_preemptions = 0

    def plan(self, step: int) -> StepPlan:
        """Plan one step while none is in flight."""
        self._grow()
        self._admit()
        return self._share_out(step)

    def _grow(self) -> None:
        """Give running sequences the blocks for their new tokens, preempting the last in order while there are none."""
        block_size = self._config.block_size
        # A decode can lack a block only where its next token starts one.
        growing = [s for s in self._running.decoding.values() if s.num_computed_tokens % block_size == 0]
        growing = [s for s in (*growing, *self._running.catching_up.values()) if self._blocks.num_missing(s) > 0]
        while growing and sum(map(self._blocks.num_missing, growing)) > self._blocks.pool.num_available:
            victim = self._running.worst()
            self._preempt(victim)
            growing = [sequence for sequence in growing if sequence is not victim]
        for sequence in growing:
            self._blocks.grow(sequence)

    def _admit(self) -> None:
        """Start waiting sequences in order, as long as this step has tokens for them and the pool has blocks."""
        for lane, queue in self._waiting.items():
            if not queue:
                continue
            if len(self._running) >= self._config.max_num_seqs and (lane == "batch" or not self._running.num_batch):
                return
            num_tokens_left = self._config.max_num_batched_tokens - self._running.num_tokens_before(lane)
            while (sequence := queue.peek()) is not None:
                if num_tokens_left <= 0 or not self._make_room(sequence):
                    return
                queue.pop()
                self._blocks.admit(sequence)
                sequence.status = SequenceStatus.RUNNING
                self._running.add(sequence)
                num_tokens_left -= sequence.num_uncomputed_tokens

    def _make_room(self, sequence: Sequence) -> bool:
        """Say whether the sequence can start, after preempting batch work if that is needed and enough."""
        if self._fits(sequence):
            return True
        if sequence.lane == "batch":
            return False
        victims = sorted(self._running.batch(), key=attrgetter("order"))
        if self._blocks.admission_shortage(sequence) > sum(map(self._blocks.num_counted, victims)):
            return False
        while victims:
            self._preempt(victims.pop())
            if self._fits(sequence):
                return True
        return False

    def _fits(self, sequence: Sequence) -> bool:
        num_running = len(self._running)
        if num_running == 0:
            return True
        return num_running < self._config.max_num_seqs and self._blocks.admission_shortage(sequence) <= 0

    def _share_out(self, step: int) -> StepPlan:
        """Give decodes one token each, and the rest of the budget to those that catch up, in order."""
        decoding = self._running.decoding
        scheduled = [ScheduledSequence(s, s.num_computed_tokens, 1, True) for s in decoding.values()]
        budget = self._config.max_num_batched_tokens
        left = budget - len(scheduled)
        for sequence in self._running.ordered_catching_up():
            if left == 0:
                break
            num_uncomputed = sequence.num_uncomputed_tokens
            num_tokens = min(num_uncomputed, left)
            left -= num_tokens
            samples = num_tokens == num_uncomputed and sequence.wants_token
            scheduled.append(ScheduledSequence(sequence, sequence.num_computed_tokens, num_tokens, samples))
        departed = self._running.take_departed() if scheduled else []
        return StepPlan(step, scheduled, budget - left, departed)

    def _preempt(self, sequence: Sequence) -> None:
        self._running.remove(sequence)
        self._blocks.release(sequence)
        sequence.status = SequenceStatus.PREEMPTED
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self._waiting[sequence.lane].push(sequence)
