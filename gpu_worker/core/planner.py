"""What the next step computes: who grows, who starts, who is preempted, and how the token budget is shared out.

Moves sequences between the waiting queues and the running set; it never ends one. The rules are the scheduler's:

- Decodes go first, one token each; prompts share what is left of the token budget in order of lane, priority and
  arrival, so a long prompt never delays a running stream by more than the budget allows.
- Admission is strictly in that order too. Batch sequences are admitted only while no interactive one waits, and are
  preempted at once when one needs their slot or their blocks.
- When running sequences outgrow the pool, the last in that order is preempted: its blocks go back (findable as long
  as nobody reuses them), and it waits again at its old place and is recomputed.
- Drafts get what is left of the budget and of the blocks after all this, for one step: they delay and preempt nobody.
- Nobody is preempted while a step is in flight: it may be computing for the victim, and what it ends may make the
  room. Planning stops there until the step has landed; sequences that were given blocks or admitted by then keep them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from operator import attrgetter

from gpu_worker.core.running_set import RunningSet
from gpu_worker.core.scheduler_config import SchedulerConfig
from gpu_worker.core.sequence import Sequence, SequenceStatus
from gpu_worker.core.sequence_blocks import SequenceBlocks
from gpu_worker.core.speculation import DraftPolicy
from gpu_worker.core.step import ScheduledSequence, StepPlan
from gpu_worker.core.waiting_queue import WaitingQueue
from shared.messages import Lane


class Planner:
    """Plans steps over queues, running set, blocks and plans in flight that it shares with the scheduler."""

    def __init__(
        self,
        config: SchedulerConfig,
        blocks: SequenceBlocks,
        waiting: dict[Lane, WaitingQueue],
        running: RunningSet,
        in_flight: deque[StepPlan],
        policy: DraftPolicy | None = None,
    ) -> None:
        """Plan for these; `waiting` lists the lanes in the order in which they are served."""
        self._config = config
        self._blocks = blocks
        self._waiting = waiting
        self._running = running
        self._in_flight = in_flight
        self._policy = policy
        self.num_preemptions = 0

    def plan(self, step: int) -> StepPlan | None:
        """Plan step number `step`, behind those in flight; None when one of these has to land first."""
        return self._share_out(step) if self._grow() and self._admit() else None

    def plan_again(self, step: int, items: Iterable[ScheduledSequence]) -> StepPlan:
        """Plan step number `step` with shares of one that was rolled back, without drafts.

        Their sequences run, and hold the blocks for it.
        """
        scheduled = [self._take(item.sequence, item.num_tokens, step) for item in items]
        num_decodes = sum(item.num_tokens == 1 and item.samples for item in scheduled)
        num_tokens = sum(item.num_tokens for item in scheduled)
        return StepPlan(step, scheduled, num_tokens, self._running.take_departed(), num_decodes)

    def _grow(self) -> bool:
        """Give running sequences the blocks for their new tokens, preempting the last in order while there are none.

        Returns:
            False when somebody would have to be preempted while a step is in flight.
        """
        block_size = self._config.block_size
        # A decode can lack a block only where its next token starts one.
        growing = [s for s in self._running.decoding.values() if s.num_computed_tokens % block_size == 0]
        growing = [s for s in (*growing, *self._running.catching_up.values()) if self._blocks.num_missing(s) > 0]
        while growing and sum(map(self._blocks.num_missing, growing)) > self._blocks.pool.num_available:
            if self._in_flight:
                return False
            victim = self._running.worst()
            self._preempt(victim)
            growing = [sequence for sequence in growing if sequence is not victim]
        for sequence in growing:
            self._blocks.grow(sequence)
        return True

    def _admit(self) -> bool:
        """Start waiting sequences in order, as long as this step has tokens for them and the pool has blocks.

        Returns:
            False when somebody would have to be preempted while a step is in flight.
        """
        for lane, queue in self._waiting.items():
            if not queue:
                continue
            if len(self._running) >= self._config.max_num_seqs and (lane == "batch" or not self._running.num_batch):
                return True
            num_tokens_left = self._config.max_num_batched_tokens - self._running.num_tokens_before(lane)
            while (sequence := queue.peek()) is not None:
                if num_tokens_left <= 0:
                    return True
                if not self._fits(sequence):
                    victims = self._victims(sequence)
                    if not victims:
                        return True
                    if self._in_flight:
                        return False
                    if not self._make_room(sequence, victims):
                        return True
                queue.pop()
                self._blocks.admit(sequence)
                sequence.status = SequenceStatus.RUNNING
                self._running.add(sequence)
                num_tokens_left -= sequence.num_uncomputed_tokens
        return True

    def _victims(self, sequence: Sequence) -> list[Sequence]:
        """Return the batch work, best first, that may be preempted for this sequence; none when all is not enough."""
        if sequence.lane == "batch":
            return []
        victims = sorted(self._running.batch(), key=attrgetter("order"))
        enough = self._blocks.admission_shortage(sequence) <= sum(map(self._blocks.num_counted, victims))
        return victims if enough else []

    def _make_room(self, sequence: Sequence, victims: list[Sequence]) -> bool:
        """Preempt victims until the sequence fits, and say whether it does."""
        while victims:
            self._preempt(victims.pop())
            if self._fits(sequence):
                return True
        return False

    def _fits(self, sequence: Sequence) -> bool:
        num_running = len(self._running)
        if num_running == 0 and not self._in_flight:
            return True
        return num_running < self._config.max_num_seqs and self._blocks.admission_shortage(sequence) <= 0

    def _share_out(self, step: int) -> StepPlan:
        """Give decodes one token each, and the rest of the budget to those that catch up, in order."""
        scheduled = self._decodes(step)
        budget = self._config.max_num_batched_tokens
        num_decodes = len(scheduled)
        left = budget - num_decodes
        for sequence in self._running.ordered_catching_up():
            if left == 0:
                break
            num_tokens = min(sequence.num_uncomputed_tokens, left)
            left -= num_tokens
            scheduled.append(self._take(sequence, num_tokens, step))
        departed = self._running.take_departed() if scheduled else []
        if self._policy is not None:
            is_changing = num_decodes < len(scheduled) or bool(departed)
            if self._policy.may_draft(num_decodes, is_changing=is_changing):
                self._add_drafts(self._policy, scheduled, num_decodes, left)
        return StepPlan(step, scheduled, budget - left, departed, num_decodes)

    def _add_drafts(
        self, policy: DraftPolicy, scheduled: list[ScheduledSequence], num_decodes: int, num_left: int
    ) -> None:
        """Let decodes, which are the first items, verify drafts with the `num_left` tokens that nobody else wants."""
        decodes = scheduled[:num_decodes]
        # The last token that a sequence may have is sampled, never drafted.
        limits = [item.sequence.max_num_tokens - item.start - 2 for item in decodes]
        depths = policy.depths([item.sequence for item in decodes], limits)
        for place, (item, limit, depth) in enumerate(zip(decodes, limits, depths, strict=True)):
            depth = min(depth, limit, num_left)
            if depth > 0:
                sequence, end = item.sequence, item.start + 1
                depth = self._blocks.cover(sequence, end + depth) - end
                num_left -= depth
                scheduled[place] = ScheduledSequence(sequence, item.start, 1, True, depth)

    def _decodes(self, step: int) -> list[ScheduledSequence]:
        """Schedule every decode. The hot loop of planning: no properties, no calls but the one that makes the item."""
        scheduled, last = [], []
        for sequence in self._running.decoding.values():
            start = sequence.num_computed_tokens
            scheduled.append(ScheduledSequence(sequence, start, 1, True))
            sequence.num_computed_tokens = start + 1
            sequence.num_pending_tokens += 1
            sequence.last_step = step
            # Token `start` is the last so far, and the one being sampled comes after it.
            if start + 2 >= sequence.max_num_tokens:
                last.append(sequence)
        for sequence in last:
            self._running.reclassify(sequence)
        return scheduled

    def _take(self, sequence: Sequence, num_tokens: int, step: int) -> ScheduledSequence:
        """Give a sequence `num_tokens` of step number `step`."""
        start = sequence.num_computed_tokens
        samples = num_tokens == sequence.num_uncomputed_tokens and sequence.wants_token
        sequence.num_computed_tokens = start + num_tokens
        sequence.num_pending_tokens += samples
        sequence.last_step = step
        self._running.reclassify(sequence)
        return ScheduledSequence(sequence, start, num_tokens, samples)

    def _preempt(self, sequence: Sequence) -> None:
        self._running.remove(sequence)
        self._blocks.release(sequence)
        sequence.status = SequenceStatus.PREEMPTED
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self._waiting[sequence.lane].push(sequence)
