"""What the next step computes: who grows, and how the token budget is shared out.

Who starts is the admission's decision, and who verifies drafts the draft planner's. The rules of all three:

- People go first: their decodes, one token each, then their prompts, in order of priority and arrival. So a long prompt
  never delays a running stream by more than the token budget allows.
- Batch sequences get what is left of the budget, and no more than `BatchThrottle` allows: decodes, then prompts, then
  newcomers. Those that get nothing are paused: they keep their blocks and their slot until somebody needs these.
- When running sequences outgrow the pool, the last in order is preempted: its blocks go back (findable as long as
  nobody reuses them), and it waits again at its old place and is recomputed.
- Drafts get what is left of the budget and of the blocks after all this, for one step.
- A sequence that needs its last token is left out of the steps behind one that samples for it; others go on, but batch
  work does not go on alone while people's sequences wait so.
- Nobody is preempted while a step is in flight: it may be computing for the victim, and what it ends may make the
  room. Planning stops there until the step has landed; sequences that were given blocks or admitted by then keep them.

What a step costs the host grows with the decodes, so a decode is only looked at when it fills a block or reaches its
last token (`Sequence.next_boundary`); else it costs the making of its share.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from heapq import nsmallest
from operator import attrgetter

from gpu_worker.core.admission import Admission
from gpu_worker.core.batch_throttle import BatchAllowance, BatchThrottle
from gpu_worker.core.draft_planner import DraftPlanner
from gpu_worker.core.live_sequences import LiveSequences
from gpu_worker.core.scheduler_config import SchedulerConfig
from gpu_worker.core.sequence import Sequence, SequenceStatus
from gpu_worker.core.sequence_blocks import SequenceBlocks
from gpu_worker.core.speculation import DraftPolicy
from gpu_worker.core.step import ScheduledSequence, StepPlan
from shared.messages import Lane


class Planner:
    """Plans steps over the sequences, blocks and plans in flight that it shares with the scheduler."""

    def __init__(
        self,
        config: SchedulerConfig,
        blocks: SequenceBlocks,
        live: LiveSequences,
        throttle: BatchThrottle,
        policy: DraftPolicy | None = None,
    ) -> None:
        """Plan for these."""
        self._config = config
        self._blocks = blocks
        self._live = live
        self._running = live.running
        self._throttle = throttle
        self._policy = policy
        self._admission = Admission(config, blocks, live)
        self._drafts = DraftPlanner(blocks)

    @property
    def num_preemptions(self) -> int:
        """Sequences that were preempted so far, each time."""
        return self._admission.num_preemptions

    def plan(self, step: int, now: float) -> StepPlan | None:
        """Plan step number `step`, behind those in flight, at `now` in monotonic seconds.

        Returns:
            None when one of the steps in flight has to land first.
        """
        running, budget = self._running, self._config.max_num_batched_tokens
        is_behind = bool(self._live.in_flight)
        decodes = running.decodes("interactive", is_behind=is_behind)
        if not self._grow("interactive", decodes) or not self._admission.admit_people(now):
            return None
        decodes = running.decodes("interactive", is_behind=is_behind)
        prompts = running.ordered_catching_up("interactive")
        num_tokens = min(budget, len(decodes) + sum([sequence.num_uncomputed_tokens for sequence in prompts]))
        num_interactive = len(decodes) + len(prompts)
        if not num_interactive and running.decoding["interactive"]:
            return None
        num_more_tokens = max(0, num_tokens - num_interactive)
        batch_decodes: list[Sequence] = []
        chunks: list[tuple[Sequence, int]] = []
        is_throttled = False
        if running.num_batch or self._live.waiting["batch"]:
            allowance = self._throttle.allowance(now, num_interactive, num_more_tokens)
            is_throttled = allowance.is_throttled
            if num_tokens < budget and not allowance.is_spent:
                batch_decodes = self._batch_decodes(allowance, budget - num_tokens)
                if not self._grow("batch", batch_decodes):
                    return None
                batch_decodes = [sequence for sequence in batch_decodes if sequence.status is SequenceStatus.RUNNING]
                chunks = self._batch_chunks(allowance, budget - num_tokens - len(batch_decodes), batch_decodes, now)
        self._throttle.planned(now, num_interactive, num_more_tokens, len(batch_decodes) + len(chunks))
        if batch_decodes:
            decodes = [*decodes, *batch_decodes]
        return self._share_out(step, decodes, prompts, chunks, len(batch_decodes), is_throttled=is_throttled)

    def plan_again(self, step: int, items: Iterable[ScheduledSequence]) -> StepPlan:
        """Plan step number `step` with shares of one that was rolled back, without drafts.

        Their sequences run, and hold the blocks for it.
        """
        shares = [(item.sequence, self._blocks.reach(item.sequence, item.num_tokens)) for item in items]
        scheduled = [self._take(sequence, num_tokens, step) for sequence, num_tokens in shares]
        # Decodes first; what began again may have become one.
        scheduled.sort(key=lambda item: item.num_tokens > 1 or not item.samples)
        self._blocks.add_state_work(scheduled, range(len(scheduled)))
        num_decodes = sum(item.num_tokens == 1 and item.samples for item in scheduled)
        num_tokens = sum(item.num_tokens for item in scheduled)
        num_batch = sum(item.sequence.lane == "batch" for item in scheduled)
        departed = self._running.take_departed()
        return StepPlan(step, scheduled, num_tokens, departed, num_decodes, num_batch=num_batch)

    def _grow(self, lane: Lane, decodes: Collection[Sequence]) -> bool:
        """Give a lane's sequences the blocks for their new tokens, preempting the last in order while there are none.

        Returns:
            False when somebody would have to be preempted while a step is in flight.
        """
        running, blocks = self._running, self._blocks
        due = running.take_due(lane, decodes)
        growing = [*due, *running.catching_up[lane].values()]
        while growing and not blocks.try_grow(growing):
            if self._live.in_flight:
                running.put_back(lane, due)
                return False
            victim = running.worst()
            self._admission.preempt(victim)
            growing = [sequence for sequence in growing if sequence is not victim]
        return True

    def _batch_decodes(self, allowance: BatchAllowance, num_tokens_left: int) -> list[Sequence]:
        """Return the batch sequences that decode in this step; the others of them are paused."""
        decodes = self._running.decodes("batch", is_behind=bool(self._live.in_flight))
        count = allowance.take_decodes(min(len(decodes), num_tokens_left))
        return list(decodes) if count == len(decodes) else nsmallest(count, decodes, key=attrgetter("order"))

    def _batch_chunks(
        self, allowance: BatchAllowance, num_left: int, batch_decodes: list[Sequence], now: float
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
        queue, admission = self._live.waiting["batch"], self._admission
        if self._live.waiting["interactive"]:
            return chunks
        while num_left and allowance.has_room and (waiting := queue.peek()) is not None and admission.fits(waiting):
            sequence = admission.start(queue, now)
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
        num_batch: int,
        *,
        is_throttled: bool,
    ) -> StepPlan:
        """Schedule the decodes, what the budget leaves for the prompts of people, and the chunks of batch prompts.

        So many of the decodes are batch work.
        """
        scheduled, state_places = self._decodes(decodes)
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
                num_batch += 1
        departed = self._running.take_departed() if scheduled else []
        num_forced = 0
        if self._running.num_needing_last_token and not self._live.in_flight:
            num_forced = self._drafts.add_forced(scheduled, num_decodes, left, is_throttled=is_throttled)
        if self._policy is not None:
            is_changing = num_decodes < len(scheduled) or bool(departed)
            # The batch may have changed behind a step in flight, whose tokens drafts would have to follow.
            if self._policy.may_draft(num_decodes, is_changing=is_changing) and not self._live.in_flight:
                self._drafts.add_drafts(
                    self._policy, scheduled, num_decodes, left - num_forced, is_throttled=is_throttled
                )
        self._blocks.add_state_work(scheduled, (*state_places, *range(num_decodes, len(scheduled))))
        num_tokens = self._config.max_num_batched_tokens - left
        return StepPlan(step, scheduled, num_tokens, departed, num_decodes, is_throttled, num_forced > 0, num_batch)

    def _decodes(self, sequences: Iterable[Sequence]) -> tuple[list[ScheduledSequence], list[int]]:
        """Schedule decodes; return also the places of those that fill a block, or are the first of their sequence.

        The hot loop of planning: no properties, no calls but the one that makes the item.
        """
        scheduled: list[ScheduledSequence] = []
        places: list[int] = []
        for sequence in sequences:
            start = sequence.num_computed_tokens
            sequence.num_computed_tokens = num_computed = start + 1
            if num_computed >= sequence.next_boundary:
                places.append(len(scheduled))
            scheduled.append(ScheduledSequence(sequence, start, 1, True))
        if places:
            self._running.reach_boundaries([scheduled[place].sequence for place in places], self._config.block_size)
        return scheduled, places

    def _take(self, sequence: Sequence, num_tokens: int, step: int) -> ScheduledSequence:
        """Give a sequence `num_tokens` of step number `step`."""
        self._blocks.take(sequence, num_tokens)
        start = sequence.num_computed_tokens
        samples = num_tokens == sequence.num_uncomputed_tokens and sequence.wants_token
        sequence.num_computed_tokens = start + num_tokens
        sequence.last_chunk_step = step
        self._running.reclassify(sequence)
        return ScheduledSequence(sequence, start, num_tokens, samples)

    def go_back(self, sequence: Sequence) -> None:
        """Let a running sequence, whose counters were set back, compute again what steps were undone.

        A recurrent state cannot be set back: there it begins again, or waits when its blocks are not enough for that.
        """
        if self._blocks.states is None:
            self._blocks.trim(sequence)
        elif not self._blocks.restart(sequence):
            self._admission.preempt(sequence)
            return
        assert self._blocks.num_missing(sequence) == 0, "blocks of drafts are left, or some were lost"
        self._running.reclassify(sequence)


def _batch_chunk(sequence: Sequence, allowance: BatchAllowance, num_left: int) -> int:
    """Return how many of `num_left` tokens a batch prompt gets: all that it has or none where it needs one step."""
    wanted = sequence.num_uncomputed_tokens
    if sequence.needs_one_step:
        return wanted if wanted <= num_left and allowance.take_whole(wanted) else 0
    return allowance.take_chunk(min(wanted, num_left)) if num_left else 0
