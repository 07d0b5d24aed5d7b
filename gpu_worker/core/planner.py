"""What the next step computes: who grows, and how the token budget is shared out.

- Interactive decodes go first, one token each, then interactive prompts, those of the tenant first that was served
  least. So a long prompt delays a stream, or another tenant's prompt, by a step at most.
- Batch sequences get the rest, as far as `BatchThrottle` allows. Those that get nothing are paused: they keep their
  blocks and their slot until others need these.
- When running sequences outgrow the pool, the last in order is preempted, and computed again later. While a step is in
  flight no sequence is preempted: planning stops until the step has landed.
- A sequence that needs its last token on the host is left out of steps behind one that samples for it.
- Drafts get the remaining budget and blocks, for one step.

A decode is looked at only when it fills a block or reaches its last token (`Sequence.next_boundary`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping
from heapq import nsmallest
from operator import attrgetter

from msgspec import Struct

from gpu_worker.core.admission import Admission, Room
from gpu_worker.core.batch_throttle import BatchAllowance, BatchThrottle
from gpu_worker.core.encoder_schedule import EncoderSchedule
from gpu_worker.core.first_tokens import FirstTokenSteps
from gpu_worker.core.live_sequences import LiveSequences
from gpu_worker.core.plan import NOTHING
from gpu_worker.core.plan_writer import PlanWriter
from gpu_worker.core.scheduler_config import SchedulerConfig
from gpu_worker.core.sequence import Sequence, SequenceStatus
from gpu_worker.core.sequence_blocks import SequenceBlocks
from gpu_worker.core.speculation import DraftPlanner, DraftPolicy
from gpu_worker.core.step import ScheduledSequence, ScheduledStep
from shared.messages import Lane


class _BatchWork(Struct, frozen=True, gc=False):
    """The batch lane's share of one step: a Struct, because every step makes one."""

    decodes: list[Sequence] = []
    chunks: list[tuple[Sequence, int]] = []
    is_throttled: bool = False


class Planner:
    """Plans steps over the sequences, blocks and plans in flight that it shares with the scheduler."""

    def __init__(
        self,
        config: SchedulerConfig,
        blocks: SequenceBlocks,
        live: LiveSequences,
        throttle: BatchThrottle,
        first_tokens: FirstTokenSteps,
        policy: DraftPolicy | None = None,
    ) -> None:
        self._config = config
        self._blocks = blocks
        self._live = live
        self._running = live.running
        self._throttle = throttle
        self._first_tokens = first_tokens
        self._policy = policy
        self.admission = Admission(config, blocks, live)
        self._drafts = DraftPlanner(blocks)
        self.encoder = EncoderSchedule(config.media)
        self.suspects: deque[Sequence] = deque()
        """Their images may have made a step fail."""
        self._writer = PlanWriter(self.encoder.take if config.media is not None else None, blocks.evictions)

    def plan(self, step: int, now: float) -> ScheduledStep | None:
        """Plan step number `step` at `now`, in monotonic seconds; None when a step in flight has to land first."""
        running, waiting, budget = self._running, self._live.waiting, self._config.max_num_batched_tokens
        if self._config.media is not None:
            self.encoder.open()
            if self.suspects and (encoding := self._encode_suspect(step)) is not None:
                return encoding
        is_growing = running.due["interactive"] or running.catching_up["interactive"]
        if is_growing and not self._grow("interactive", self._next_decodes("interactive")):
            return None
        if waiting["interactive"] and not self.admission.admit_interactive(now):
            return None
        decodes = self._next_decodes("interactive")
        num_tokens = num_interactive = len(decodes)
        prompts: list[Sequence] = []
        limit = budget - num_tokens
        if running.catching_up["interactive"]:
            prompts = self.admission.ordered_prompts()
            limit = self._first_tokens.limit(prompts, num_tokens, limit, now)
            num_tokens += min(limit, sum([sequence.num_computable_tokens for sequence in prompts]))
            num_interactive += len(prompts)
        if not num_interactive and running.decoding["interactive"]:
            # All of them need a token that a step in flight samples. Batch work alone would make them wait longer.
            return None
        num_more_tokens = max(0, num_tokens - num_interactive)
        batch: _BatchWork | None = _BatchWork()
        if running.num_batch or waiting["batch"]:
            batch = self._batch_work(now, num_interactive, num_more_tokens, budget - num_tokens)
        if batch is None:
            return None
        self._throttle.planned(now, num_interactive, num_more_tokens, len(batch.decodes) + len(batch.chunks))
        return self._share_out(step, decodes, prompts, batch, limit)

    def plan_again(self, step: int, items: Iterable[ScheduledSequence]) -> ScheduledStep:
        """Plan step number `step` with shares of one that was rolled back, without drafts; images of theirs first.

        Their sequences run, and hold the blocks for it.
        """
        shares = [(item.sequence, self._blocks.reach(item.sequence, item.num_tokens)) for item in items]
        if self._config.media is not None:
            self.encoder.open()
            if (encoding := self._encode_alone(step, shares)) is not None:
                return encoding
        scheduled = [self._take(sequence, num_tokens, step) for sequence, num_tokens in shares]
        # Decodes first: a share that was restarted may have become one.
        scheduled.sort(key=lambda item: item.num_tokens > 1 or not item.samples)
        if self._blocks.states is not None:
            self._blocks.add_state_work(scheduled, range(len(scheduled)))
        num_decodes = sum(item.num_tokens == 1 and item.samples for item in scheduled)
        num_tokens = sum(item.num_tokens for item in scheduled)
        num_batch = sum(item.sequence.lane == "batch" for item in scheduled)
        departed = self._running.take_departed()
        plan = self._writer.write(step, scheduled, num_tokens, departed, num_decodes, has_drafts=False)
        return ScheduledStep(step, scheduled, num_tokens, departed, num_decodes, num_batch=num_batch, plan=plan)

    def _encode_alone(self, step: int, shares: Iterable[tuple[Sequence, int]]) -> ScheduledStep | None:
        """Plan a step of nothing but images of the first sequence that lacks some for its share; None if none does."""
        for sequence, num_tokens in shares:
            if sequence.media:
                budget = self._config.max_num_batched_tokens
                self.encoder.reach(sequence, num_tokens, budget, is_alone=True, is_first=True, is_urgent=True)
            if self.encoder.has_works:
                return ScheduledStep(step, [], 0, [], 0, plan=self._writer.write_encoding(step))
        return None

    def suspect(self, sequences: Iterable[Sequence], passes: Mapping[bytes, int]) -> None:
        """Suspect sequences of which a failed step encoded images: up to `passes` of each one."""
        self.suspects.extend([each for each in sequences if each not in self.suspects])
        self.encoder.suspected |= passes

    def _encode_suspect(self, step: int) -> ScheduledStep | None:
        while self.suspects:
            sequence = self.suspects[0]
            num_tokens = min(sequence.num_uncomputed_tokens, self._config.max_num_batched_tokens)
            if self.encoder.is_suspect(sequence) and (encoding := self._encode_alone(step, [(sequence, num_tokens)])):
                return encoding
            self.suspects.popleft()
        self.encoder.suspected.clear()
        return None

    def plan_control(self, step: int, control: ScheduledSequence) -> ScheduledStep:
        """Plan step number `step` with nothing but a share that is not of a running sequence."""
        departed = self._running.take_departed()
        plan = self._writer.write(step, [control], 1, departed, 1, has_drafts=False)
        self._running.departed.append(control.sequence)
        return ScheduledStep(step, [control], 1, departed, 1, plan=plan)

    def _next_decodes(self, lane: Lane) -> Collection[Sequence]:
        return self._running.decodes(lane, is_behind=bool(self._live.in_flight), num_groups=self._config.num_groups)

    def _grow(self, lane: Lane, decodes: Collection[Sequence]) -> bool:
        """Give a lane's sequences the blocks for their new tokens, preempting the last in order while there are none.

        False when somebody would have to be preempted while a step is in flight.
        """
        running, blocks = self._running, self._blocks
        due = running.take_due(lane, decodes)
        growing = [*due, *running.catching_up[lane].values()]
        is_landed = not self._live.in_flight
        while growing and not (
            (not blocks.num_budgeted or blocks.evict(growing, is_landed=is_landed)) and blocks.try_grow(growing)
        ):
            if self._live.in_flight:
                running.put_back(lane, due)
                return False
            victim = self.admission.worst(blocks.crowded_part(growing))
            self.admission.preempt(victim)
            growing = [sequence for sequence in growing if sequence is not victim]
        return True

    def _batch_work(self, now: float, num_interactive: int, num_more_tokens: int, num_left: int) -> _BatchWork | None:
        """Return the batch work that fits into `num_left` tokens and that the throttle allows; blocks are taken for it.

        None when a step in flight has to land first.
        """
        tried = self._live.on_trial
        self._live.settle("batch")
        allowance = self._throttle.allowance(now, num_interactive, num_more_tokens, is_trial=bool(tried))
        if num_left <= 0 or allowance.is_spent:
            return _BatchWork(is_throttled=allowance.is_throttled)
        trial = self._room_for_trial(tried) if tried else Room.NO
        if trial is Room.AFTER_LANDING:
            return None
        # Beside people a trial would last as long as the batch work beside it, which pauses instead.
        is_trial = trial is Room.YES and allowance.is_throttled
        decodes = self._batch_decodes(allowance, num_left, is_trial=is_trial)
        if not self._grow("batch", decodes):
            return None
        # Growing may have preempted some.
        decodes = [sequence for sequence in decodes if sequence.status is SequenceStatus.RUNNING]
        chunks = self._batch_chunks(allowance, num_left - len(decodes), decodes, now, is_trial=is_trial)
        return _BatchWork(decodes, chunks, allowance.is_throttled)

    def _room_for_trial(self, tried: list[Sequence]) -> Room:
        """Return whether a batch sequence on trial runs, or can start, after preempting others for it if need be."""
        first = self._live.waiting["batch"].peek()
        room = Room.NO
        if first is not None and first.is_on_trial and not self._live.waiting["interactive"]:
            room = self.admission.make_room(first)
        if room is Room.NO and any(sequence.status is SequenceStatus.RUNNING for sequence in tried):
            return Room.YES
        return room

    def _batch_decodes(
        self, allowance: BatchAllowance, num_tokens_left: int, *, is_trial: bool
    ) -> Collection[Sequence]:
        """Return the batch sequences that decode in this step, the first in order; the others are paused."""
        decodes = self._next_decodes("batch")
        if is_trial:
            decodes = [sequence for sequence in decodes if sequence.is_on_trial]
        count = allowance.take_decodes(min(len(decodes), num_tokens_left))
        return list(decodes) if count == len(decodes) else nsmallest(count, decodes, key=attrgetter("order"))

    def _batch_chunks(
        self, allowance: BatchAllowance, num_left: int, batch_decodes: list[Sequence], now: float, *, is_trial: bool
    ) -> list[tuple[Sequence, int]]:
        """Share `num_left` tokens among batch prompts: first those that run, then waiting ones, which start now.

        A sequence that starts with a single token to compute (a resumed one, say) is appended to `batch_decodes`.
        """
        chunks: list[tuple[Sequence, int]] = []
        for sequence in self._running.ordered_catching_up("batch"):
            if is_trial and not sequence.is_on_trial:
                continue
            num_tokens = _batch_chunk(sequence, allowance, num_left)
            if num_tokens == 0:
                return chunks
            chunks.append((sequence, num_tokens))
            num_left -= num_tokens
        queue, admission = self._live.waiting["batch"], self.admission
        if self._live.waiting["interactive"]:
            return chunks
        while num_left and allowance.has_room and (waiting := queue.peek()) is not None and admission.fits(waiting):
            if is_trial and not waiting.is_on_trial:
                return chunks
            if self._live.try_restore(queue, waiting, now):
                continue
            admission.start(queue, waiting, now)
            num_tokens = _batch_chunk(waiting, allowance, num_left)
            if num_tokens == 0:
                return chunks
            num_left -= num_tokens
            if waiting.id in self._running.decoding["batch"]:
                batch_decodes.append(waiting)
            else:
                chunks.append((waiting, num_tokens))
        return chunks

    def _share_out(
        self, step: int, decodes: Collection[Sequence], prompts: list[Sequence], batch: _BatchWork, limit: int
    ) -> ScheduledStep:
        scheduled, state_places = self._decodes([*decodes, *batch.decodes] if batch.decodes else decodes)
        num_decodes = len(scheduled)
        left, charged, num_batch = self._config.max_num_batched_tokens - num_decodes, 0, len(batch.decodes)
        if prompts or batch.chunks:
            others = left - min(limit, left - sum([count for _, count in batch.chunks]))
            left, charged = self._add_prompts(scheduled, prompts, left, others, step)
            num_before = len(scheduled)
            left, charged_batch = self._add_batch_chunks(scheduled, batch.chunks, left, step)
            charged, num_batch = charged + charged_batch, num_batch + len(scheduled) - num_before
        departed = self._running.take_departed() if scheduled and self._running.departed else []
        is_alone = has_drafts = False
        if self._policy is not None or self._running.num_needing_last_token:
            is_changing = num_decodes < len(scheduled) or bool(departed)
            is_alone, has_drafts = self._add_drafts(
                scheduled, num_decodes, left, is_changing=is_changing, is_throttled=batch.is_throttled
            )
        if self._blocks.states is not None:
            self._blocks.add_state_work(scheduled, (*state_places, *range(num_decodes, len(scheduled))))
        num_tokens = self._config.max_num_batched_tokens - left - charged
        plan = NOTHING
        if scheduled:
            has_drafts = has_drafts or is_alone
            plan = self._writer.write(step, scheduled, num_tokens, departed, num_decodes, has_drafts=has_drafts)
        elif self.encoder.has_works:
            plan = self._writer.write_encoding(step)
        return ScheduledStep(
            step, scheduled, num_tokens, departed, num_decodes, batch.is_throttled, is_alone, num_batch, plan
        )

    def _add_prompts(
        self, scheduled: list[ScheduledSequence], prompts: list[Sequence], left: int, num_kept: int, step: int
    ) -> tuple[int, int]:
        """Give interactive prompts `left` tokens, but for `num_kept`: of batch chunks, or to keep the step short.

        Return how many are left then, and what images were charged.
        """
        charged, num_before = 0, len(scheduled)
        for sequence in prompts:
            num_tokens = self._blocks.reach(sequence, min(sequence.num_uncomputed_tokens, left - num_kept))
            if sequence.media:
                is_first = len(scheduled) == num_before
                num_tokens, cost = self.encoder.reach(
                    sequence, num_tokens, left - num_kept, is_alone=not scheduled, is_first=is_first
                )
                left, charged = left - cost, charged + cost
                self._live.waiting[sequence.lane].counters.charge_images(sequence, cost)
            if num_tokens < sequence.num_uncomputed_tokens and sequence.needs_one_step:
                continue
            if num_tokens > 0:
                scheduled.append(self._take(sequence, num_tokens, step))
                left -= num_tokens
        return left, charged

    def _add_batch_chunks(
        self, scheduled: list[ScheduledSequence], chunks: list[tuple[Sequence, int]], left: int, step: int
    ) -> tuple[int, int]:
        """Schedule batch chunks as far as the windows' blocks reach, and images are encoded.

        Return how many of `left` tokens are left then, and what images were charged.
        """
        charged = 0
        for sequence, wanted in chunks:
            # Images before it may have been charged what it was to have.
            num_tokens = self._blocks.reach(sequence, min(wanted, left))
            if sequence.media:
                is_alone, most = not scheduled, self._blocks.reach(sequence, left)
                budget = left if is_alone else min(wanted, left)
                num_tokens, cost = self.encoder.reach(
                    sequence, num_tokens, budget, is_alone=is_alone, is_first=is_alone, spare=most - budget
                )
                left, charged = left - cost, charged + cost
                self._live.waiting[sequence.lane].counters.charge_images(sequence, cost)
            if num_tokens > 0 and (num_tokens == wanted or not sequence.needs_one_step):
                scheduled.append(self._take(sequence, num_tokens, step))
                left -= num_tokens
        return left, charged

    def _add_drafts(
        self, scheduled: list[ScheduledSequence], num_decodes: int, left: int, *, is_changing: bool, is_throttled: bool
    ) -> tuple[bool, bool]:
        """Let decodes verify forced tokens and drafts; return whether any are forced, and whether others may come."""
        num_forced = 0
        if self._running.num_needing_last_token and not self._live.in_flight:
            num_forced = self._drafts.add_forced(scheduled, num_decodes, left, is_throttled=is_throttled)
        # The policy is asked even when a step is in flight, because it follows how the batch changes. But drafts would
        # have to follow the tokens of that step.
        policy = self._policy
        may_draft = policy is not None and policy.may_draft(num_decodes, is_changing=is_changing)
        if policy is not None and may_draft and not self._live.in_flight:
            self._drafts.add_drafts(policy, scheduled, num_decodes, left - num_forced, is_throttled=is_throttled)
        return num_forced > 0, may_draft

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
        start = sequence.num_computed_tokens
        self._blocks.windows.grow(sequence, start + num_tokens)
        samples = num_tokens == sequence.num_uncomputed_tokens and sequence.wants_token
        sequence.num_computed_tokens = start + num_tokens
        sequence.last_chunk_step = step
        self._running.reclassify(sequence)
        return ScheduledSequence(sequence, start, num_tokens, samples)

    def roll_back(self, sequence: Sequence) -> None:
        """Let a running sequence compute again what undone steps computed; its counters were set back already.

        A recurrent state cannot be set back: the sequence restarts, or is preempted when blocks are too few for that.
        """
        if self._blocks.states is None:
            self._blocks.trim(sequence)
        elif not self._blocks.restart(sequence):
            self.admission.preempt(sequence)
            return
        self._running.reclassify(sequence)


def _batch_chunk(sequence: Sequence, allowance: BatchAllowance, num_left: int) -> int:
    """Return how many of `num_left` tokens a batch prompt gets: all that it has or none where it needs one step."""
    wanted = sequence.num_computable_tokens
    if sequence.needs_one_step:
        return wanted if wanted <= num_left and allowance.take_whole(wanted) else 0
    return allowance.take_chunk(min(wanted, num_left)) if num_left else 0
