"""What the next step computes: who grows, who starts, who is preempted, and how the token budget is shared out.

Moves sequences between the waiting queues and the running set; it never ends one. The rules are the scheduler's:

- People go first: their decodes, one token each, then their prompts, in order of priority and arrival. So a long prompt
  never delays a running stream by more than the token budget allows.
- Batch sequences get what is left of the budget, and no more than `BatchThrottle` allows: decodes, then prompts, then
  newcomers. Those that get nothing are paused: they keep their blocks and their slot until somebody needs these.
- Admission is strictly in order of lane, priority and arrival. Batch sequences are admitted only while no interactive
  one waits, and are preempted at once when one needs their slot or their blocks.
- When running sequences outgrow the pool, the last in that order is preempted: its blocks go back (findable as long
  as nobody reuses them), and it waits again at its old place and is recomputed.
- Drafts get what is left of the budget and of the blocks after all this, for one step: they delay and preempt nobody.
- A sequence that needs its last token is left out of the steps behind one that samples for it; others go on, but batch
  work does not go on alone while people's sequences wait so.
- Tokens that a sequence's constraint forces are verified as drafts that are right for certain, some at once.
- Nobody is preempted while a step is in flight: it may be computing for the victim, and what it ends may make the
  room. Planning stops there until the step has landed; sequences that were given blocks or admitted by then keep them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from heapq import nsmallest
from operator import attrgetter

from gpu_worker.core.batch_throttle import BatchAllowance, BatchThrottle
from gpu_worker.core.running_set import RunningSet
from gpu_worker.core.scheduler_config import SchedulerConfig
from gpu_worker.core.sequence import Sequence, SequenceStatus
from gpu_worker.core.sequence_blocks import SequenceBlocks
from gpu_worker.core.speculation import DraftPolicy
from gpu_worker.core.step import ScheduledSequence, StepPlan
from gpu_worker.core.waiting_queue import WaitingQueue
from shared.messages import Lane

MAX_FORCED_TOKENS = 16
"""Of a sequence in a step: others wait for as long as these take."""


class Planner:
    """Plans steps over queues, running set, blocks and plans in flight that it shares with the scheduler."""

    def __init__(
        self,
        config: SchedulerConfig,
        blocks: SequenceBlocks,
        waiting: dict[Lane, WaitingQueue],
        running: RunningSet,
        in_flight: deque[StepPlan],
        throttle: BatchThrottle,
        policy: DraftPolicy | None = None,
    ) -> None:
        """Plan for these."""
        self._config = config
        self._blocks = blocks
        self._waiting = waiting
        self._running = running
        self._in_flight = in_flight
        self._throttle = throttle
        self._policy = policy
        self.num_preemptions = 0
        self._now = 0.0

    def plan(self, step: int, now: float) -> StepPlan | None:
        """Plan step number `step`, behind those in flight, at `now` in monotonic seconds.

        Returns:
            None when one of the steps in flight has to land first.
        """
        self._now = now
        running, budget = self._running, self._config.max_num_batched_tokens
        is_behind = bool(self._in_flight)
        decodes = running.decodes("interactive", is_behind=is_behind)
        if not self._grow(decodes, running.catching_up["interactive"].values()) or not self._admit_people():
            return None
        decodes = running.decodes("interactive", is_behind=is_behind)
        prompts = running.ordered_catching_up("interactive")
        num_tokens = min(budget, len(decodes) + sum([sequence.num_uncomputed_tokens for sequence in prompts]))
        num_interactive = len(decodes) + len(prompts)
        if not num_interactive and running.decoding["interactive"]:
            return None
        num_more_tokens = max(0, num_tokens - num_interactive)
        allowance = self._throttle.allowance(now, num_interactive, num_more_tokens)
        batch_decodes: list[Sequence] = []
        chunks: list[tuple[Sequence, int]] = []
        if num_tokens < budget and not allowance.is_spent:
            batch_decodes = self._batch_decodes(allowance, budget - num_tokens)
            if not self._grow(batch_decodes, running.catching_up["batch"].values()):
                return None
            batch_decodes = [sequence for sequence in batch_decodes if sequence.status is SequenceStatus.RUNNING]
            chunks = self._batch_chunks(allowance, budget - num_tokens - len(batch_decodes), batch_decodes)
        self._throttle.planned(num_interactive, num_more_tokens, len(batch_decodes) + len(chunks))
        if batch_decodes:
            decodes = [*decodes, *batch_decodes]
        return self._share_out(step, decodes, prompts, chunks, is_throttled=allowance.is_throttled)

    def plan_again(self, step: int, items: Iterable[ScheduledSequence]) -> StepPlan:
        """Plan step number `step` with shares of one that was rolled back, without drafts.

        Their sequences run, and hold the blocks for it.
        """
        shares = [(item.sequence, self._blocks.reach(item.sequence, item.num_tokens)) for item in items]
        scheduled = [self._take(sequence, num_tokens, step) for sequence, num_tokens in shares]
        self._blocks.add_state_work(scheduled)
        num_decodes = sum(item.num_tokens == 1 and item.samples for item in scheduled)
        num_tokens = sum(item.num_tokens for item in scheduled)
        return StepPlan(step, scheduled, num_tokens, self._running.take_departed(), num_decodes)

    def _grow(self, decodes: Iterable[Sequence], catching_up: Iterable[Sequence]) -> bool:
        """Give sequences the blocks for their new tokens, preempting the last in order while there are none.

        Returns:
            False when somebody would have to be preempted while a step is in flight.
        """
        block_size, blocks = self._config.block_size, self._blocks
        # A decode can lack a block only where its next token starts one.
        growing = [sequence for sequence in decodes if sequence.num_computed_tokens % block_size == 0]
        growing = [sequence for sequence in (*growing, *catching_up) if blocks.is_short(sequence)]
        while growing and not blocks.can_grow(growing):
            if self._in_flight:
                return False
            victim = self._running.worst()
            self.preempt(victim)
            growing = [sequence for sequence in growing if sequence is not victim]
        for sequence in growing:
            blocks.grow(sequence)
        return True

    def _admit_people(self) -> bool:
        """Start waiting interactive sequences in order, as long as this step has tokens and the pool has blocks.

        Returns:
            False when somebody would have to be preempted while a step is in flight.
        """
        queue, running = self._waiting["interactive"], self._running
        if not queue or (len(running) >= self._config.max_num_seqs and not running.num_batch):
            return True
        num_tokens_left = self._config.max_num_batched_tokens - len(running.decoding["interactive"])
        num_tokens_left -= sum([s.num_uncomputed_tokens for s in running.catching_up["interactive"].values()])
        while num_tokens_left > 0 and (sequence := queue.peek()) is not None:
            if not self._fits(sequence):
                victims = self._victims(sequence)
                if not victims:
                    return True
                if self._in_flight:
                    return False
                if not self._make_room(sequence, victims):
                    return True
            self._start(queue)
            num_tokens_left -= sequence.num_uncomputed_tokens
        return True

    def _start(self, queue: WaitingQueue) -> Sequence:
        """Start the first sequence of a queue, which fits."""
        sequence = queue.pop()
        self._blocks.admit(sequence)
        sequence.status = SequenceStatus.RUNNING
        if sequence.scheduled_at is None:
            sequence.scheduled_at = self._now
        self._running.add(sequence)
        return sequence

    def _victims(self, sequence: Sequence) -> list[Sequence]:
        """Return the batch work, best first, that may be preempted for this one of people; none if not enough."""
        victims = sorted(self._running.batch(), key=attrgetter("order"))
        return victims if self._blocks.would_fit_without(sequence, victims) else []

    def _make_room(self, sequence: Sequence, victims: list[Sequence]) -> bool:
        """Preempt victims until the sequence fits, and say whether it does."""
        while victims:
            self.preempt(victims.pop())
            if self._fits(sequence):
                return True
        return False

    def _fits(self, sequence: Sequence) -> bool:
        num_running = len(self._running)
        if num_running == 0 and not self._in_flight:
            return True
        return num_running < self._config.max_num_seqs and self._blocks.fits(sequence)

    def _batch_decodes(self, allowance: BatchAllowance, num_tokens_left: int) -> list[Sequence]:
        """Return the batch sequences that decode in this step; the others of them are paused."""
        decodes = self._running.decodes("batch", is_behind=bool(self._in_flight))
        count = allowance.take_decodes(min(len(decodes), num_tokens_left))
        return list(decodes) if count == len(decodes) else nsmallest(count, decodes, key=attrgetter("order"))

    def _batch_chunks(
        self, allowance: BatchAllowance, num_left: int, batch_decodes: list[Sequence]
    ) -> list[tuple[Sequence, int]]:
        """Return which batch prompts get how many of `num_left` tokens: those that run, then those that start now.

        What starts with a single token to compute is appended to `batch_decodes`.
        """
        chunks: list[tuple[Sequence, int]] = []
        for sequence in self._running.ordered_catching_up("batch"):
            num_tokens = _batch_chunk(sequence, allowance, num_left)
            if num_tokens == 0:
                return chunks
            chunks.append((sequence, num_tokens))
            num_left -= num_tokens
        queue = self._waiting["batch"]
        if self._waiting["interactive"]:
            return chunks
        while num_left and allowance.has_room and (waiting := queue.peek()) is not None and self._fits(waiting):
            sequence = self._start(queue)
            num_tokens = _batch_chunk(sequence, allowance, num_left)
            if num_tokens == 0:
                return chunks
            num_left -= num_tokens
            if sequence.id in self._running.decoding["batch"]:
                batch_decodes.append(sequence)
            else:
                chunks.append((sequence, num_tokens))
        return chunks

    def _share_out(
        self,
        step: int,
        decodes: Iterable[Sequence],
        prompts: list[Sequence],
        batch_chunks: list[tuple[Sequence, int]],
        *,
        is_throttled: bool,
    ) -> StepPlan:
        """Schedule the decodes, what the budget leaves for the prompts of people, and the chunks of batch prompts."""
        scheduled = self._decodes(step, decodes)
        num_decodes = len(scheduled)
        left = self._config.max_num_batched_tokens - num_decodes
        num_batch_tokens = sum([num_tokens for _, num_tokens in batch_chunks])
        for sequence in prompts:
            num_tokens = self._blocks.reach(sequence, min(sequence.num_uncomputed_tokens, left - num_batch_tokens))
            if num_tokens < sequence.num_uncomputed_tokens and sequence.needs_one_step:
                continue
            if num_tokens > 0:
                scheduled.append(self._take(sequence, num_tokens, step))
                left -= num_tokens
        for sequence, wanted in batch_chunks:
            num_tokens = self._blocks.reach(sequence, wanted)
            if num_tokens > 0 and (num_tokens == wanted or not sequence.needs_one_step):
                scheduled.append(self._take(sequence, num_tokens, step))
                left -= num_tokens
        departed = self._running.take_departed() if scheduled else []
        num_forced = 0
        if self._running.num_needing_last_token and not self._in_flight:
            num_forced = self._add_forced(scheduled, num_decodes, left, is_throttled=is_throttled)
        if self._policy is not None:
            is_changing = num_decodes < len(scheduled) or bool(departed)
            # The batch may have changed behind a step in flight, whose tokens drafts would have to follow.
            if self._policy.may_draft(num_decodes, is_changing=is_changing) and not self._in_flight:
                limits = _draft_limits(scheduled[:num_decodes], is_throttled=is_throttled)
                self._add_drafts(self._policy, scheduled, limits, left - num_forced)
        self._blocks.add_state_work(scheduled)
        num_tokens = self._config.max_num_batched_tokens - left
        return StepPlan(step, scheduled, num_tokens, departed, num_decodes, is_throttled, num_forced > 0)

    def _add_forced(
        self, scheduled: list[ScheduledSequence], num_decodes: int, num_left: int, *, is_throttled: bool
    ) -> int:
        """Let decodes, which are the first items, verify what their constraints force; return how many tokens."""
        left = num_left
        for place, item in enumerate(scheduled[:num_decodes]):
            sequence = item.sequence
            if sequence.constraint is None or not (forced := sequence.constraint.forced_tokens()):
                continue
            count = min(len(forced), MAX_FORCED_TOKENS, left, *_draft_limits([item], is_throttled=is_throttled))
            if count > 0:
                count = self._blocks.cover(sequence, item.start + 1 + count) - item.start - 1
            if count > 0:
                scheduled[place] = ScheduledSequence(sequence, item.start, 1, True, count, True)
                left -= count
        return num_left - left

    def _add_drafts(
        self, policy: DraftPolicy, scheduled: list[ScheduledSequence], limits: list[int], num_left: int
    ) -> None:
        """Let decodes, which are the first items, verify drafts with the `num_left` tokens that nobody else wants."""
        decodes = scheduled[: len(limits)]
        depths = policy.depths([item.sequence for item in decodes], limits)
        for place, (item, limit, depth) in enumerate(zip(decodes, limits, depths, strict=True)):
            depth = min(depth, limit, num_left)
            if depth > 0 and not item.is_forced:
                sequence, end = item.sequence, item.start + 1
                depth = self._blocks.cover(sequence, end + depth) - end
                num_left -= depth
                scheduled[place] = ScheduledSequence(sequence, item.start, 1, True, depth)

    def _decodes(self, step: int, sequences: Iterable[Sequence]) -> list[ScheduledSequence]:
        """Schedule decodes. The hot loop of planning: no properties, no calls but the one that makes the item."""
        scheduled, last = [], []
        for sequence in sequences:
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
        self._blocks.take(sequence, num_tokens)
        start = sequence.num_computed_tokens
        samples = num_tokens == sequence.num_uncomputed_tokens and sequence.wants_token
        sequence.num_computed_tokens = start + num_tokens
        sequence.num_pending_tokens += samples
        sequence.last_step = step
        self._running.reclassify(sequence)
        return ScheduledSequence(sequence, start, num_tokens, samples)

    def go_back(self, sequence: Sequence) -> None:
        """Let a running sequence, whose counters were set back, compute again what steps were undone.

        A recurrent state cannot be set back: there it begins again, or waits when its blocks are not enough for that.
        """
        if self._blocks.states is None:
            self._blocks.trim(sequence)
        elif not self._blocks.restart(sequence):
            self.preempt(sequence)
            return
        self._running.reclassify(sequence)

    def preempt(self, sequence: Sequence) -> None:
        """Take a running sequence out, which no step in flight names; it waits at its old place."""
        self._running.remove(sequence)
        self._blocks.release(sequence)
        sequence.status = SequenceStatus.PREEMPTED
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self._waiting[sequence.lane].push(sequence)


def _batch_chunk(sequence: Sequence, allowance: BatchAllowance, num_left: int) -> int:
    """Return how many of `num_left` tokens a batch prompt gets: all that it has or none where it needs one step."""
    wanted = sequence.num_uncomputed_tokens
    if sequence.needs_one_step:
        return wanted if wanted <= num_left and allowance.take_whole(wanted) else 0
    return allowance.take_chunk(min(wanted, num_left)) if num_left else 0


def _draft_limits(decodes: list[ScheduledSequence], *, is_throttled: bool) -> list[int]:
    """Return how many drafts each decode may verify: none of batch sequences while people set the pace."""
    # The last token that a sequence may have is sampled, never drafted.
    return [
        0 if is_throttled and item.sequence.lane == "batch" else item.sequence.max_num_tokens - item.start - 2
        for item in decodes
    ]
