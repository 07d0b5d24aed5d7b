"""Decides what every step computes, and applies what it computed.

Owns all sequences from `add` to their last event: their counters and status, the waiting queues, the running set,
and through `SequenceBlocks` the KV blocks. A step is `schedule` → (the runner executes the plan) → `settle`.

- Decodes go first, one token each; prompts share what is left of the token budget in order of lane, priority and
  arrival, so a long prompt never delays a running stream by more than the budget allows.
- Admission is strictly in that order too. Batch sequences are admitted only while no interactive one waits, and are
  preempted at once when one needs their slot or their blocks.
- When running sequences outgrow the pool, the last in that order is preempted: its blocks go back (findable as long
  as nobody reuses them), and it waits again at its old place and is recomputed.

One step is in flight at a time. To plan step N+1 before N is settled, `schedule` would have to count the tokens in
flight as computed, give decodes a block for a token it does not know yet, and keep a deque of plans whose blocks are
released by the last plan that names the sequence; `settle` already ignores sequences that ended meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter

from gpu_worker.core.deadlines import Deadlines
from gpu_worker.core.running_set import RunningSet
from gpu_worker.core.sequence import Sequence, SequenceStatus
from gpu_worker.core.sequence_blocks import SequenceBlocks
from gpu_worker.core.step import SampledTokens, ScheduledSequence, SequenceEvent, StepPlan, StepResult
from gpu_worker.core.stopping import extend, finish_reason
from gpu_worker.core.waiting_queue import WaitingQueue
from shared.errors import PromptTooLongError
from shared.messages import FinishReason, Lane


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Sizes that do not change while the engine runs.

    Attributes:
        max_num_seqs: Sequences that may run at once.
        max_num_batched_tokens: Token budget of a step; at least `max_num_seqs`, so that every decode fits.
        max_model_len: Prompt and output tokens of a sequence at most.
    """

    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    enable_prefix_caching: bool = True

    def __post_init__(self) -> None:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}), or running sequences could not all go on in one step"
            )

    @property
    def max_num_tokens(self) -> int:
        """Longest sequence: what the model allows and the whole pool can hold."""
        return min(self.max_model_len, self.num_blocks * self.block_size)


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """A snapshot. `waiting_tokens` counts tokens known and not computed, of waiting and running prompts.

    Attributes:
        free_blocks: Blocks that can be handed out, those with findable content included.
        num_prefix_queries: Prompt tokens admitted so far, and of these `num_prefix_hits` found in the prefix cache.
    """

    running: int
    running_batch: int
    waiting: int
    waiting_batch: int
    waiting_tokens: int
    free_blocks: int
    total_blocks: int
    num_preemptions: int
    num_prefix_queries: int
    num_prefix_hits: int


class DuplicateSequenceError(ValueError):
    """A sequence with this id is in the engine already."""


class Scheduler:
    """Not thread safe. `step` is the number of the last settled step."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.step = 0
        self._blocks = SequenceBlocks(
            config.num_blocks, config.block_size, enable_prefix_caching=config.enable_prefix_caching
        )
        self._sequences: dict[str, Sequence] = {}
        self._running = RunningSet()
        self._waiting: dict[Lane, WaitingQueue] = {"interactive": WaitingQueue(), "batch": WaitingQueue()}
        self._deadlines = Deadlines()
        self._in_flight: StepPlan | None = None
        self._events: list[SequenceEvent] = []
        self._num_added = 0
        self._num_preemptions = 0

    @property
    def stats(self) -> SchedulerStats:
        """Count what runs, waits and is free."""
        interactive, batch = self._waiting["interactive"], self._waiting["batch"]
        uncomputed = sum(sequence.num_uncomputed_tokens for sequence in self._running.catching_up.values())
        return SchedulerStats(
            running=len(self._running),
            running_batch=self._running.num_batch,
            waiting=len(interactive) + len(batch),
            waiting_batch=len(batch),
            waiting_tokens=interactive.num_tokens + batch.num_tokens + uncomputed,
            free_blocks=self._blocks.pool.num_available,
            total_blocks=self.config.num_blocks,
            num_preemptions=self._num_preemptions,
            num_prefix_queries=self._blocks.num_prefix_queries,
            num_prefix_hits=self._blocks.num_prefix_hits,
        )

    @property
    def sequences(self) -> list[Sequence]:
        """The sequences that have not finished, best first."""
        return sorted(self._sequences.values(), key=attrgetter("order"))

    def has_work(self) -> bool:
        """Say whether a step would compute something or report an event."""
        return bool(self._sequences or self._events)

    def validate(self, sequence: Sequence) -> None:
        """Refuse a sequence that could never run. Reads only the configuration, so any thread may call it.

        Raises:
            PromptTooLongError: The prompt leaves no room for a generated token.
        """
        if sequence.num_prompt_tokens >= self.config.max_num_tokens:
            raise PromptTooLongError(sequence.num_prompt_tokens, self.config.max_num_tokens)
        assert sequence.num_prompt_tokens > 0, "a sequence needs at least one token to start from"

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence; one that its emitted tokens have already completed only gets its last event.

        Raises:
            PromptTooLongError: The prompt leaves no room for a generated token.
            DuplicateSequenceError: Its id is in use.
        """
        self.validate(sequence)
        if sequence.id in self._sequences:
            raise DuplicateSequenceError(f"sequence {sequence.id!r} is in the engine already")
        sampling = sequence.sampling
        stop_ids = frozenset(sampling.stop_token_ids)
        sequence.stop_ids = stop_ids if sampling.ignore_eos else stop_ids | sequence.eos_token_ids
        sequence.max_num_tokens = min(sequence.num_prompt_tokens + sequence.max_tokens, self.config.max_num_tokens)
        self._num_added += 1
        sequence.order = (sequence.lane == "batch", -sequence.priority, sequence.arrival, self._num_added)
        reason = finish_reason(sequence)
        if reason is not None and (sequence.num_output_tokens > 0 or sampling.prompt_logprobs is None):
            sequence.status = SequenceStatus.FINISHED
            self._events.append(SequenceEvent(sequence, (), sequence.num_output_tokens, reason))
            return
        self._sequences[sequence.id] = sequence
        self._waiting[sequence.lane].push(sequence)
        if sequence.deadline is not None:
            self._deadlines.watch(sequence, len(self._sequences))

    def abort(self, sequence_id: str) -> Sequence | None:
        """Drop a sequence without an event; None when it is not here (any more).

        Its blocks are free at once or, when it is part of the step in flight, after that step.
        """
        sequence = self._sequences.get(sequence_id)
        if sequence is not None:
            self._finish(sequence)
        return sequence

    def schedule(self, now: float) -> StepPlan:
        """Plan the next step; nothing is scheduled when there is nothing to compute.

        Args:
            now: Monotonic seconds; sequences whose deadline has passed end here, and `settle` reports them.
        """
        assert self._in_flight is None, "schedule() before the last step was settled"
        for sequence in self._deadlines.pop_expired(now):
            self._finish(sequence)
            self._events.append(SequenceEvent(sequence, (), sequence.num_output_tokens, "expired"))
        preempted: list[Sequence] = []
        self._grow(preempted)
        self._admit(preempted)
        self._in_flight = self._plan(preempted)
        return self._in_flight

    def settle(self, plan: StepPlan, result: StepResult) -> list[SequenceEvent]:
        """Apply the outcome of the step in flight and return what it did to each sequence."""
        assert plan is self._in_flight, "settle() of a step that is not in flight"
        assert plan.step == result.step
        assert len(plan.scheduled) == len(result.sampled)
        self._land(plan)
        events, self._events = self._events, []
        for item, sampled in zip(plan.scheduled, result.sampled, strict=True):
            if item.sequence.status is SequenceStatus.FINISHED:
                self._blocks.release(item.sequence)
                continue
            event = self._apply(item, sampled)
            if event is not None:
                events.append(event)
        return events

    def fail(self, plan: StepPlan, error: str) -> list[SequenceEvent]:
        """End all sequences of the step in flight because it could not be executed."""
        assert plan is self._in_flight, "fail() of a step that is not in flight"
        self._land(plan)
        events, self._events = self._events, []
        for item in plan.scheduled:
            sequence = item.sequence
            if sequence.status is SequenceStatus.FINISHED:
                self._blocks.release(sequence)
                continue
            self._finish(sequence)
            events.append(SequenceEvent(sequence, (), sequence.num_output_tokens, "failed", error=error))
        return events

    def check_integrity(self) -> None:
        """Assert that blocks, counters and queues agree. Costs time in proportion to the pool; for tests and idle."""
        holders = list(self._running)
        if self._in_flight is not None:
            flying = [item.sequence for item in self._in_flight.scheduled]
            holders += [sequence for sequence in flying if sequence.status is SequenceStatus.FINISHED]
        self._blocks.check_integrity(holders)
        num_waiting = sum(map(len, self._waiting.values()))
        assert len(self._running) + num_waiting == len(self._sequences)
        assert self._running.num_batch == sum(sequence.lane == "batch" for sequence in self._running)
        for sequence in self._running.decoding.values():
            assert sequence.num_uncomputed_tokens == 1

    def _grow(self, preempted: list[Sequence]) -> None:
        """Give running sequences the blocks for their new tokens, preempting the last in order while there are none."""
        block_size = self.config.block_size
        growing = [
            sequence
            for sequence in self._running.decoding.values()
            if sequence.num_computed_tokens >= len(sequence.block_table) * block_size
        ]
        growing += [s for s in self._running.catching_up.values() if self._blocks.num_missing(s) > 0]
        while growing and sum(map(self._blocks.num_missing, growing)) > self._blocks.pool.num_available:
            victim = self._running.worst()
            self._preempt(victim, preempted)
            growing = [sequence for sequence in growing if sequence is not victim]
        for sequence in growing:
            self._blocks.grow(sequence)

    def _admit(self, preempted: list[Sequence]) -> None:
        """Start waiting sequences in order, as long as this step has tokens for them and the pool has blocks."""
        for lane, queue in self._waiting.items():
            if not queue:
                continue
            if len(self._running) >= self.config.max_num_seqs and (lane == "batch" or not self._running.num_batch):
                return
            num_tokens_left = self.config.max_num_batched_tokens - self._running.num_tokens_before(lane)
            while (sequence := queue.peek()) is not None:
                # What was preempted in this step stays out of it: the runner must see it leave.
                if num_tokens_left <= 0 or sequence in preempted or not self._make_room(sequence, preempted):
                    return
                queue.pop()
                self._blocks.admit(sequence)
                sequence.status = SequenceStatus.RUNNING
                self._running.add(sequence)
                num_tokens_left -= sequence.num_uncomputed_tokens

    def _make_room(self, sequence: Sequence, preempted: list[Sequence]) -> bool:
        """Say whether the sequence can start, after preempting batch work if that is needed and enough."""
        if self._fits(sequence):
            return True
        if sequence.lane == "batch":
            return False
        victims = sorted(self._running.batch(), key=attrgetter("order"))
        if self._blocks.admission_shortage(sequence) > sum(map(self._blocks.num_counted, victims)):
            return False
        while victims:
            self._preempt(victims.pop(), preempted)
            if self._fits(sequence):
                return True
        return False

    def _fits(self, sequence: Sequence) -> bool:
        num_running = len(self._running)
        if num_running == 0:
            return True
        return num_running < self.config.max_num_seqs and self._blocks.admission_shortage(sequence) <= 0

    def _plan(self, preempted: list[Sequence]) -> StepPlan:
        decoding = self._running.decoding
        scheduled = [ScheduledSequence(s, s.num_computed_tokens, 1, True) for s in decoding.values()]
        budget = self.config.max_num_batched_tokens
        left = budget - len(scheduled)
        for sequence in self._running.ordered_catching_up():
            if left == 0:
                break
            num_uncomputed = sequence.num_uncomputed_tokens
            num_tokens = min(num_uncomputed, left)
            left -= num_tokens
            samples = num_tokens == num_uncomputed and sequence.wants_token
            scheduled.append(ScheduledSequence(sequence, sequence.num_computed_tokens, num_tokens, samples))
        return StepPlan(self.step + 1, scheduled, budget - left, preempted)

    def _apply(self, item: ScheduledSequence, sampled: SampledTokens) -> SequenceEvent | None:
        """Apply one sequence's share of a step. The hot path: once per sequence and step."""
        sequence = item.sequence
        token_ids, new = sequence.token_ids, sampled.token_ids if item.samples else ()
        num_before = len(token_ids)
        finish: FinishReason | None = None
        num_computed = item.start + item.num_tokens
        if len(new) == 1:
            token_ids.append(new[0])
            if new[0] in sequence.stop_ids:
                finish = "stop"
            elif num_before + 1 >= sequence.max_num_tokens:
                finish = "length"
        elif new:
            count, finish = extend(sequence, new)
            new = new[:count]
            # Drafts that were scheduled and then rejected are not part of the sequence.
            num_computed = min(num_computed, len(token_ids) - 1)
        else:
            assert not item.samples, "the runner sampled no token for a sequence that wants one"
            finish = "length" if num_computed == num_before else None
        sequence.num_computed_tokens = num_computed
        if num_computed >= (sequence.num_findable_blocks + 1) * self.config.block_size:
            self._blocks.publish(sequence)
        if finish is not None:
            self._finish(sequence)
        elif item.num_tokens != 1 or len(new) != 1:
            self._running.reclassify(sequence)
        prompt_logprobs = sampled.prompt_logprobs
        if prompt_logprobs:
            prompt_logprobs = prompt_logprobs[max(0, sequence.num_prompt_logprobs - item.start) :]
            sequence.num_prompt_logprobs += len(prompt_logprobs)
        if not new and finish is None and not prompt_logprobs:
            return None
        logprobs = sampled.logprobs[: len(new)]
        return SequenceEvent(sequence, new, num_before - sequence.num_prompt_tokens, finish, logprobs, prompt_logprobs)

    def _land(self, plan: StepPlan) -> None:
        self._in_flight = None
        if plan.scheduled:
            self.step = plan.step

    def _finish(self, sequence: Sequence) -> None:
        """Take a sequence out for good; blocks that the step in flight uses are released when it lands."""
        was_running = sequence.status is SequenceStatus.RUNNING
        sequence.status = SequenceStatus.FINISHED
        del self._sequences[sequence.id]
        if not was_running:
            self._waiting[sequence.lane].discard(sequence)
            return
        self._running.remove(sequence)
        flying = self._in_flight is not None and any(item.sequence is sequence for item in self._in_flight.scheduled)
        if not flying:
            self._blocks.release(sequence)

    def _preempt(self, sequence: Sequence, preempted: list[Sequence]) -> None:
        self._running.remove(sequence)
        self._blocks.release(sequence)
        sequence.status = SequenceStatus.PREEMPTED
        sequence.num_preemptions += 1
        self._num_preemptions += 1
        self._waiting[sequence.lane].push(sequence)
        preempted.append(sequence)
