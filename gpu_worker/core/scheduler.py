"""Decides what every step computes, and applies what it computed.

Owns all sequences from `add` to their last event: their counters and status, the waiting queues, the running set, the
plans in flight, and through `SequenceBlocks` the KV blocks. A step is `schedule` → (the runner executes the plan) →
`settle`. What a step computes is the planner's decision; this module takes sequences in, applies results, ends them.

Several steps may be in flight, planned one behind the other and landing in that order. Counters advance when a step is
planned: `schedule` gives a decode its next block before its token is known. What only the token tells comes when the
step lands: the end of the sequence, and blocks that others may find. So a sequence can end while a later step computes
for it. That step's tokens are dropped, and the blocks go back when the last step that names the sequence lands.

A step that verifies drafts is in flight alone, since only its result says how many tokens the next starts from, and so
is one that may draft: drafts follow known tokens. While the policy backs off, steps follow one another as without it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from operator import attrgetter

from gpu_worker.core.batch_throttle import BatchThrottle
from gpu_worker.core.deadlines import Deadlines
from gpu_worker.core.isolation import begun_again, control_share
from gpu_worker.core.planner import Planner
from gpu_worker.core.running_set import RunningSet
from gpu_worker.core.scheduler_config import SchedulerConfig, SchedulerStats
from gpu_worker.core.sequence import Sequence, SequenceStatus
from gpu_worker.core.sequence_blocks import SequenceBlocks
from gpu_worker.core.speculation import Speculation
from gpu_worker.core.step import SampledTokens, ScheduledSequence, SequenceEvent, StepPlan, StepResult
from gpu_worker.core.step_time import StepTimeModel
from gpu_worker.core.stopping import extend, finish_reason, refusal, set_limits
from gpu_worker.core.waiting_queue import WaitingQueue
from shared.errors import BadRequestError, PromptTooLongError
from shared.messages import Lane

__all__ = ["DuplicateSequenceError", "Scheduler", "SchedulerConfig", "SchedulerStats"]


class DuplicateSequenceError(ValueError):
    """A sequence with this id is in the engine already."""


class Scheduler:
    """Not thread safe. `step` is the number of the last step that landed."""

    def __init__(self, config: SchedulerConfig, speculation: Speculation | None = None) -> None:
        self.config = config
        self.speculation = speculation
        self.step = 0
        self._blocks = SequenceBlocks(config)
        self._sequences: dict[str, Sequence] = {}
        self._running = RunningSet()
        self._waiting: dict[Lane, WaitingQueue] = {"interactive": WaitingQueue(), "batch": WaitingQueue()}
        self._in_flight: deque[StepPlan] = deque()
        policy = None if speculation is None else speculation.policy
        self._step_time = StepTimeModel()
        self._throttle = BatchThrottle(self._step_time, config.batch_slowdown)
        self._planner = Planner(
            config, self._blocks, self._waiting, self._running, self._in_flight, self._throttle, policy
        )
        self._deadlines = Deadlines()
        self._events: list[SequenceEvent] = []
        self._is_landmark = self._blocks.landmarks
        self._num_added = self._num_planned = 0

    @property
    def stats(self) -> SchedulerStats:
        """Count what runs, waits and is free."""
        interactive, batch = self._waiting["interactive"], self._waiting["batch"]
        return SchedulerStats(
            running=len(self._running),
            running_batch=self._running.num_batch,
            waiting=len(interactive) + len(batch),
            waiting_batch=len(batch),
            max_batch_seqs=self._throttle.max_batch_seqs(self.config.max_num_seqs),
            waiting_tokens=interactive.num_tokens + batch.num_tokens + self._running.num_tokens_behind,
            free_blocks=self._blocks.num_free,
            total_blocks=self.config.num_blocks,
            groups=self._blocks.usage,
            num_preemptions=self._planner.num_preemptions,
            num_prefix_queries=self._blocks.num_prefix_queries,
            num_prefix_hits=self._blocks.num_prefix_hits,
        )

    def is_saturated_by(self, plan: StepPlan) -> bool:
        """Say whether no more sequences could have run in a step: not where batch work waits for the sake of people."""
        if len(plan.scheduled) >= self.config.max_num_seqs or self._waiting["interactive"]:
            return True
        return bool(self._waiting["batch"]) and not plan.is_throttled

    @property
    def sequences(self) -> list[Sequence]:
        """The sequences that have not finished, best first."""
        return sorted(self._sequences.values(), key=attrgetter("order"))

    def has_work(self) -> bool:
        """Say whether there is something to compute, to land or to report."""
        return bool(self._sequences or self._events or self._in_flight)

    def pause_s(self, now: float) -> float:
        """Return for how many seconds it is better to compute nothing than batch work, because people may come back.

        Whoever drives the scheduler may wait so long for something new; a step is planned whenever one is asked for.

        Args:
            now: Monotonic seconds.
        """
        if self._in_flight or self._events or self._waiting["interactive"]:
            return 0.0
        if len(self._running) > self._running.num_batch:
            return 0.0
        return self._throttle.pause_s(now)

    def validate(self, sequence: Sequence) -> None:
        """Refuse a sequence that could never run. Reads only the configuration, so any thread may call it.

        Raises:
            PromptTooLongError: The prompt leaves no room for a generated token.
            BadRequestError: The prompt is empty.
        """
        num_generated, limit = int(sequence.pooling is None), self.config.max_num_tokens
        if sequence.needs_one_step:
            limit = min(limit, self.config.max_num_batched_tokens)
        if sequence.num_prompt_tokens + num_generated > limit:
            raise PromptTooLongError(sequence.num_prompt_tokens, limit, num_generated=num_generated)
        if sequence.num_prompt_tokens == 0:
            raise BadRequestError("The prompt has no tokens; at least one is needed to start from.", "prompt")

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence; one that its emitted tokens have already completed only gets its last event.

        Raises:
            PromptTooLongError: The prompt leaves no room for a generated token.
            BadRequestError: The prompt is empty.
            DuplicateSequenceError: Its id is in use.
        """
        self.validate(sequence)
        if sequence.id in self._sequences:
            raise DuplicateSequenceError(f"sequence {sequence.id!r} is in the engine already")
        set_limits(sequence, self.config.max_num_tokens)
        self._num_added += 1
        sequence.order = (sequence.lane == "batch", -sequence.priority, sequence.arrival, self._num_added)
        reason = finish_reason(sequence)
        if reason is not None and (sequence.num_output_tokens > 0 or not sequence.reports_prompt):
            sequence.status = SequenceStatus.FINISHED
            self._events.append(SequenceEvent(sequence, (), sequence.num_output_tokens, reason))
            return
        self._sequences[sequence.id] = sequence
        self._waiting[sequence.lane].push(sequence)
        if sequence.deadline is not None:
            self._deadlines.watch(sequence, len(self._sequences))

    def abort(self, sequence_id: str) -> Sequence | None:
        """Drop a sequence without an event; None when it is not here (any more).

        Its blocks are free at once or, when steps in flight name it, after the last of these.
        """
        sequence = self._sequences.get(sequence_id)
        if sequence is not None:
            self._finish(sequence)
        return sequence

    def schedule(self, now: float) -> StepPlan | None:
        """Plan the next step, behind those in flight.

        Args:
            now: Monotonic seconds; sequences whose deadline has passed end here, and `settle` reports them.

        Returns:
            A plan, which is now in flight; one without any sequence when there is nothing to compute at all. None when
            a step in flight has to land first.
        """
        for sequence in self._deadlines.pop_expired(now):
            self._finish(sequence)
            self._events.append(SequenceEvent(sequence, (), sequence.num_output_tokens, "expired"))
        if self._in_flight and (self._in_flight[-1].is_alone or (self.speculation and self.speculation.may_draft)):
            return None
        plan = self._planner.plan(self._num_planned + 1, now)
        if plan is None or (self._in_flight and not plan.scheduled):
            return None
        self._in_flight.append(plan)
        if plan.scheduled:
            self._num_planned = plan.step
        return plan

    def settle(self, plan: StepPlan, result: StepResult) -> list[SequenceEvent]:
        """Apply the outcome of the oldest step in flight and return what it did to each sequence."""
        assert plan.step == result.step
        assert len(plan.scheduled) == len(result.sampled)
        self._land(plan)
        events = self.take_events()
        block_size, finished = self.config.block_size, SequenceStatus.FINISHED
        is_landmark = self._is_landmark
        self._blocks.land_states(plan, result)
        for item, sampled in zip(plan.scheduled, result.sampled, strict=True):
            sequence, new = item.sequence, sampled.token_ids
            if sequence.status is finished:
                self._release_after(plan, sequence)
                continue
            token_ids = sequence.token_ids
            num_before = len(token_ids)
            # The hot path, once per running sequence and step: a decode that goes on.
            if (
                item.num_tokens == 1
                and len(new) == 1
                and not item.num_draft_tokens
                and num_before + 1 < sequence.max_num_tokens
                and new[0] not in sequence.stop_ids
                and (sequence.constraint is None or sequence.constraint.advance_inside(new[0]))
            ):
                token_ids.append(new[0])
                sequence.num_pending_tokens -= 1
                if is_landmark[num_before % block_size]:
                    self._blocks.publish(sequence, num_before)
                num_output = num_before - sequence.num_prompt_tokens
                events.append(SequenceEvent(sequence, new, num_output, None, sampled.logprobs))
            elif (event := self._apply(item, sampled)) is not None:
                events.append(event)
        return events

    def roll_back(self) -> list[ScheduledSequence]:
        """Undo all steps in flight, because the oldest could not be executed. Their results must not come any more.

        What they wrote into blocks will be written again. The next plan names their sequences as departed, so that the
        runner forgets what these steps made of them.

        Returns:
            The shares of the oldest step, of sequences that still run.
        """
        oldest = self._in_flight[0]
        touched: dict[Sequence, None] = {}
        for plan in reversed(self._in_flight):
            self._running.departed += plan.departed
            for item in plan.scheduled:
                sequence = item.sequence
                touched[sequence] = None
                if sequence.status is SequenceStatus.FINISHED:
                    self._release_after(plan, sequence)
                else:
                    sequence.num_computed_tokens = item.start
                    sequence.num_pending_tokens -= item.samples
        self._in_flight.clear()
        self.step = self._num_planned
        self._running.departed += touched
        for sequence in touched:
            if sequence.status is SequenceStatus.RUNNING:
                self._planner.go_back(sequence)
        shares = [item for item in oldest.scheduled if item.sequence.status is SequenceStatus.RUNNING]
        return shares if self._blocks.states is None else begun_again(shares, self.config.max_num_batched_tokens)

    def schedule_again(self, items: Iterable[ScheduledSequence]) -> StepPlan | None:
        """Plan a step of nothing but some of the shares that `roll_back` returned, without their drafts.

        Nothing was planned for these sequences since. No step may be in flight.

        Returns:
            A plan, which is now in flight; None when none of the sequences runs any more.
        """
        assert not self._in_flight
        running = [item for item in items if item.sequence.status is SequenceStatus.RUNNING]
        if not running:
            return None
        plan = self._planner.plan_again(self._num_planned + 1, running)
        self._in_flight.append(plan)
        self._num_planned = plan.step
        return plan

    def control_step(self, sequence: Sequence) -> StepPlan:
        """Return a step that any runner can compute: one token of a sequence that nobody asked for.

        It is not in flight, and must be computed at once. It writes where the next token of `sequence` belongs, which
        must run, and end right after that.
        """
        control = control_share(sequence, self.config.block_size)
        self._num_planned += 1
        self.step = self._num_planned
        departed = self._running.take_departed()
        self._running.departed.append(control.sequence)
        return StepPlan(self.step, [control], 1, departed, 1)

    def fail(self, sequence: Sequence, error: str) -> None:
        """End a sequence because it cannot be executed; the next `settle` or `take_events` reports it."""
        if sequence.status is not SequenceStatus.FINISHED:
            self._finish(sequence)
            self._events.append(SequenceEvent(sequence, (), sequence.num_output_tokens, "failed", error=error))

    def take_events(self) -> list[SequenceEvent]:
        """Return the ends of sequences that no step has reported yet."""
        events, self._events = self._events, []
        return events

    def observe(self, plan: StepPlan, result: StepResult, duration_s: float, now: float) -> None:
        """Learn how long a step took that has landed at `now`, in monotonic seconds."""
        self._throttle.landed(plan, duration_s, now)
        num_drafted = 0 if self.speculation is None else sum([sampled.num_drafted for sampled in result.sampled])
        self._step_time.observe_step(plan, num_drafted, duration_s)

    def check_integrity(self) -> None:
        """Assert that blocks, counters and queues agree. Costs time in proportion to the pool; for tests and idle."""
        flying = {item.sequence for plan in self._in_flight for item in plan.scheduled}
        ended = {sequence for sequence in flying if sequence.status is SequenceStatus.FINISHED}
        self._blocks.check_integrity([*self._running, *ended])
        self._running.check_integrity()
        assert len(self._running) + sum(map(len, self._waiting.values())) == len(self._sequences)
        assert all(sequence.block_table for sequence in flying), "blocks went back while a step uses them"
        assert flying == ended | {sequence for sequence in self._running if self._is_flying(sequence)}
        for sequence in self._sequences.values():
            items = [item for plan in self._in_flight for item in plan.scheduled if item.sequence is sequence]
            assert sequence.num_pending_tokens == sum(item.samples for item in items)
            num_written = sequence.num_computed_tokens - sum(item.num_tokens for item in items)
            assert sequence.num_findable_blocks * self.config.block_size <= num_written, (
                f"{sequence.id} has published a block before all its KV is written"
            )

    def _apply(self, item: ScheduledSequence, sampled: SampledTokens) -> SequenceEvent | None:
        """Apply one sequence's share of a step, whatever it is."""
        sequence = item.sequence
        if sampled.error is not None:
            return self._apply_error(item, sampled, sampled.error)
        new = sampled.token_ids if item.samples else ()
        assert bool(new) == item.samples, "the runner sampled no token for a sequence that wants one"
        assert len(sampled.accepted) <= min(item.num_draft_tokens, max(0, len(new) - 1)), (
            "more was accepted than sampled"
        )
        num_before = sequence.num_output_tokens
        num_computed = item.start + item.num_tokens
        sequence.num_pending_tokens -= item.samples
        assert len(new) <= 1 or not self._is_flying(sequence), "a step in flight took one token for certain"
        count, finish = extend(sequence, new)
        if item.num_draft_tokens:
            accepted = sampled.accepted[:count]
            num_computed += min(len(accepted), max(0, count - 1))
            sequence.num_computed_tokens = num_computed
            self._record_drafts(item, sampled, accepted)
        if not item.samples and num_computed == len(sequence.token_ids):
            finish = finish_reason(sequence)
        self._blocks.publish(sequence, num_computed)
        of_prompt = sampled.prompt_logprobs[max(0, sequence.num_prompt_logprobs - item.start) :]
        sequence.num_prompt_logprobs += len(of_prompt)
        if sampled.pooled is not None:
            sequence.pooled.append(sampled.pooled)
        if finish is not None:
            self._finish(sequence)
        elif count > 1:
            self._running.reclassify(sequence)
        if not count and finish is None and not of_prompt:
            return None
        logprobs = sampled.logprobs[:count]
        return SequenceEvent(sequence, new[:count], num_before, finish, logprobs, of_prompt, refusal(sequence))

    def _apply_error(self, item: ScheduledSequence, sampled: SampledTokens, error: str) -> SequenceEvent:
        """End a sequence behind the tokens that it got before the error, unless these end it already.

        Nobody is to find what its blocks hold, because the cause of the error may be in there.
        """
        sequence, num_before = item.sequence, item.sequence.num_output_tokens
        count, finish = extend(sequence, sampled.token_ids)
        self._record_drafts(item, sampled, sampled.accepted[:count])
        if finish is None:
            self._blocks.hide(sequence)
        self._finish(sequence)
        new, logprobs = sampled.token_ids[:count], sampled.logprobs[:count]
        reason = error if finish is None else refusal(sequence)
        return SequenceEvent(sequence, new, num_before, finish or "failed", logprobs, error=reason)

    def _record_drafts(self, item: ScheduledSequence, sampled: SampledTokens, accepted: tuple[int, ...]) -> None:
        """Count the drafts of a step, but for forced ones, and take back the blocks of those that were wrong."""
        if self.speculation is not None and not item.is_forced:
            self.speculation.record(item.sequence, sampled.num_drafted, accepted)
        self._blocks.trim(item.sequence)

    def _land(self, plan: StepPlan) -> None:
        assert next(iter(self._in_flight), None) is plan, "the step is not in flight, or not the oldest"
        self._in_flight.popleft()
        if plan.scheduled:
            self.step = plan.step

    def _is_flying(self, sequence: Sequence) -> bool:
        """Say whether a step in flight names the sequence."""
        return sequence.last_step > self.step

    def _release_after(self, plan: StepPlan, sequence: Sequence) -> None:
        """Take the blocks of an ended sequence back when the plan that landed is the last that names it."""
        if sequence.last_step == plan.step:
            self._blocks.release(sequence)

    def _finish(self, sequence: Sequence) -> None:
        """Take a sequence out for good; blocks that steps in flight use are released when the last of them lands."""
        was_running = sequence.status is SequenceStatus.RUNNING
        sequence.status = SequenceStatus.FINISHED
        del self._sequences[sequence.id]
        if not was_running:
            self._waiting[sequence.lane].discard(sequence)
            return
        self._running.remove(sequence)
        sequence.num_pending_tokens = 0
        if not self._is_flying(sequence):
            self._blocks.release(sequence)
