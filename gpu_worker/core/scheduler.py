"""Decides what every step computes, and applies what it computed: `schedule`, then the runner, then `settle`.

Several steps may be in flight, planned one behind the other and landing in that order. Counters advance when a step is
planned: `schedule` gives a decode its next block before its token is known. A step that verifies drafts, or may draft,
is in flight alone, since only its result says how many tokens the next one starts from.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping
from itertools import count

from gpu_worker.core.batch_throttle import BatchThrottle
from gpu_worker.core.constraint import SharedConstraints
from gpu_worker.core.first_tokens import FirstTokenSteps
from gpu_worker.core.fleet_service import HeardServices
from gpu_worker.core.isolation import control_share, restarted_shares
from gpu_worker.core.landing import Landing, finish_reason, set_limits
from gpu_worker.core.live_sequences import LiveSequences
from gpu_worker.core.media import SharedImages
from gpu_worker.core.planner import Planner
from gpu_worker.core.restores import Restores
from gpu_worker.core.scheduler_config import SchedulerConfig, SchedulerStats
from gpu_worker.core.sequence import Sequence, SequenceStatus
from gpu_worker.core.sequence_blocks import SequenceBlocks
from gpu_worker.core.speculation import Speculation
from gpu_worker.core.step import ScheduledSequence, ScheduledStep, SequenceEvent, StepResult
from gpu_worker.core.step_time import DeviceTime, StepTimeModel
from gpu_worker.core.tiers import KvTiers
from shared.errors import BadRequestError, PromptTooLongError
from shared.messages import Lane
from shared.services import Services

PRIORITY_S = 60.0
"""Seconds of waiting that one level of priority is worth among the sequences of a key: none is passed for ever."""

_SWEEP_MINIMUM = 64

RESTORE_POLL_S = 0.001
"""How often to look whether a prefix has arrived while there is nothing else to do."""


class Deadlines:
    """A heap of deadlines, `first` its earliest. Sequences that finish earlier stay in it until swept out or due."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Sequence]] = []
        self._tie_breaker = count()
        self.first = math.inf

    def watch(self, sequence: Sequence, num_live: int) -> None:
        """Watch a sequence that has a deadline; `num_live` unfinished sequences exist, this one included."""
        assert sequence.deadline is not None
        heapq.heappush(self._heap, (sequence.deadline, next(self._tie_breaker), sequence))
        if len(self._heap) > 2 * num_live + _SWEEP_MINIMUM:
            self._heap = [entry for entry in self._heap if entry[2].status is not SequenceStatus.FINISHED]
            heapq.heapify(self._heap)
        self.first = self._heap[0][0]

    def pop_expired(self, now: float) -> list[Sequence]:
        """Remove and return the unfinished sequences whose deadline is not after `now`."""
        expired = []
        while self._heap and self._heap[0][0] <= now:
            sequence = heapq.heappop(self._heap)[2]
            if sequence.status is not SequenceStatus.FINISHED:
                expired.append(sequence)
        self.first = self._heap[0][0] if self._heap else math.inf
        return expired


class DuplicateSequenceError(ValueError):
    """A sequence with this id is in the engine already."""


class Scheduler:
    """Not thread safe."""

    def __init__(
        self,
        config: SchedulerConfig,
        speculation: Speculation | None = None,
        constraints: SharedConstraints | None = None,
        tiers: KvTiers | None = None,
        images: SharedImages | None = None,
    ) -> None:
        self.config = config
        self.speculation = speculation
        self.tiers = tiers if config.enable_prefix_caching else None
        self._constraints = constraints
        self._images = images or SharedImages()
        self._blocks = SequenceBlocks(config, self.tiers)
        restores = None if self.tiers is None else Restores(self.tiers, self._blocks, config.block_size)
        self._live = LiveSequences(self._blocks, constraints, restores)
        self._running, self._waiting, self._in_flight = self._live.running, self._live.waiting, self._live.in_flight
        policy = None if speculation is None else speculation.policy
        self._step_time = StepTimeModel()
        self._device_time = DeviceTime(self._step_time)
        self._throttle = BatchThrottle(self._step_time, config.batch_slowdown)
        self.first_tokens = FirstTokenSteps(self._step_time)
        self._planner = Planner(config, self._blocks, self._live, self._throttle, self.first_tokens, policy)
        self._landing = Landing(self._blocks, self._live, speculation)
        self._deadlines = Deadlines()
        self._events: list[SequenceEvent] = []
        self._num_added = 0

    @property
    def step(self) -> int:
        """Number of the last step that landed."""
        return self._live.num_landed

    @property
    def stats(self) -> SchedulerStats:
        """Count what runs, waits and is free."""
        return SchedulerStats(
            running=len(self._running),
            running_batch=self._running.num_batch,
            waiting=sum(map(len, self._waiting.values())) + self._live.num_restoring,
            waiting_batch=len(self._waiting["batch"]),
            max_batch_seqs=self._throttle.max_batch_seqs(self.config.max_num_seqs),
            waiting_tokens=self._num_waiting_tokens,
            free_blocks=self._blocks.num_free,
            total_blocks=self.config.num_blocks,
            groups=self._blocks.usage,
            num_preemptions=self._planner.admission.num_preemptions,
            num_prefix_queries=self._blocks.num_prefix_queries,
            num_prefix_hits=self._blocks.num_prefix_hits,
            num_device_hits=self._blocks.num_device_hits,
            num_evicted_blocks=self._blocks.num_evicted,
            num_retained_blocks=self._blocks.parts.num_retained,
            full_step_rate=self.full_step_rate,
        )

    @property
    def _num_waiting_tokens(self) -> int:
        num_restoring = 0 if self._live.restores is None else self._live.restores.num_tokens
        return (
            sum(queue.num_tokens for queue in self._waiting.values()) + num_restoring + self._running.num_tokens_behind
        )

    @property
    def full_step_rate(self) -> float:
        """Prompt tokens per second of a full step, by the model of step times; 0 while unknown."""
        return self._step_time.prefill_rate(self.config.max_num_batched_tokens)

    @property
    def num_blank_blocks(self) -> int:
        """Blocks that keep all tokens and hold nothing."""
        return self._blocks.parts.num_blank

    def is_cached(self, digest: bytes) -> bool:
        """Return whether the prefix cache has a block of this digest."""
        return self._blocks.parts.have(digest)

    def is_saturated_by(self, step: ScheduledStep) -> bool:
        """Return whether no more sequences could have run in a step; batch work that was throttled does not count."""
        if len(step.scheduled) >= self.config.max_num_seqs or self._waiting["interactive"]:
            return True
        return bool(self._waiting["batch"]) and not step.is_throttled

    @property
    def sequences(self) -> list[Sequence]:
        """The sequences that have not finished, best first."""
        return self._live.ordered

    def has_work(self) -> bool:
        """Return whether there is something to compute, to land or to report."""
        return bool(self._live or self._events or self._in_flight)

    def pause_s(self, now: float) -> float:
        """Return for how many seconds batch work should wait at `now`: interactive requests are likely to come."""
        if self._in_flight or self._events:
            return 0.0
        restores = self._live.restores
        if restores and not self._running and not restores.has_news(now):
            return RESTORE_POLL_S
        if self._waiting["interactive"] or len(self._running) > self._running.num_batch:
            return 0.0
        return self._throttle.pause_s(now)

    def validate(self, sequence: Sequence) -> None:
        """Refuse a sequence that could never run. Reads only the configuration, so any thread may call it.

        Raises:
            PromptTooLongError: The prompt leaves no room for a generated token.
            BadRequestError: The prompt is empty.
        """
        num_generated, limit = int(sequence.pooling is None), self.config.max_num_tokens
        if sequence.budget is not None:
            limit = self.config.max_model_len
        if sequence.needs_one_step:
            limit = min(limit, self.config.max_num_batched_tokens)
        if sequence.num_prompt_tokens + num_generated > limit:
            raise PromptTooLongError(sequence.num_prompt_tokens, limit, num_generated=num_generated)
        if sequence.num_prompt_tokens == 0:
            raise BadRequestError("The prompt has no tokens; at least one is needed to start from.", "prompt")
        self._planner.encoder.validate(sequence)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence; one that its emitted tokens have already completed only gets its last event.

        Raises:
            DuplicateSequenceError: Its id is in use.
        """
        self.validate(sequence)
        if self._live.get(sequence.id) is not None:
            raise DuplicateSequenceError(f"sequence {sequence.id!r} is in the engine already")
        set_limits(sequence, self.config.max_num_tokens)
        self._num_added += 1
        rank = 0 if sequence.lane == "interactive" else 1 if sequence.is_on_trial else 2
        sequence.order = (rank, sequence.arrival - sequence.priority * PRIORITY_S, self._num_added)
        reason = finish_reason(sequence)
        if reason is not None and (sequence.num_output_tokens > 0 or not sequence.reports_prompt):
            sequence.status = SequenceStatus.FINISHED
            self._events.append(SequenceEvent(sequence, (), sequence.num_output_tokens, reason))
            return
        self._live.add(sequence)
        sequence.images = self._images.share(sequence.images)
        if sequence.deadline is not None:
            self._deadlines.watch(sequence, len(self._live))

    def abort(self, sequence_id: str) -> Sequence | None:
        """Drop a sequence without an event; None when it is not here (any more).

        Its blocks are free at once or, when steps in flight name it, after the last of those in flight.
        """
        sequence = self._live.get(sequence_id)
        if sequence is not None:
            self._live.finish(sequence)
        return sequence

    def schedule(self, now: float) -> ScheduledStep | None:
        """Plan the next step, behind those in flight; None when one of these has to land first.

        The step, which is now in flight, has no sequence when there is nothing to compute but images. Sequences whose
        deadline is not after `now`, in monotonic seconds, end here, and `settle` reports them.
        """
        if self._live.restores:
            self._live.end_restores(now)
        if now >= self._deadlines.first:
            self._expire(now)
        self._blocks.expire(now)
        if self._in_flight and (self._in_flight[-1].is_alone or (self.speculation and self.speculation.may_draft)):
            return None
        self._live.now = now
        step = self._planner.plan(self._live.num_planned + 1, now)
        if step is None or (self._in_flight and step.is_empty):
            return None
        self._live.add_step(step)
        return step

    def settle(self, step: ScheduledStep, result: StepResult) -> list[SequenceEvent]:
        """Apply the outcome of the oldest step in flight and return what it did to each sequence."""
        assert step.step == result.step
        assert len(step.scheduled) == len(result.sampled)
        self._live.land(step)
        self._device_time.find_payers(step)
        events = self.take_events()
        self._landing.apply(step, result, events)
        return events

    def roll_back(self, *, has_failed: bool = True) -> list[ScheduledSequence]:
        """Undo all steps in flight, because the oldest failed or was given up. Their results must not come any more.

        What they wrote into blocks will be written again. The next plan names their sequences as departed, so that the
        runner forgets what these steps made of them. Return the shares of the oldest step, of sequences that still run.
        """
        oldest, evicting = self._in_flight[0], self._blocks.evictions.unlanded()
        touched: dict[Sequence, None] = {}
        for step in reversed(self._in_flight):
            self._running.departed += step.departed
            for item in step.scheduled:
                sequence = item.sequence
                touched[sequence] = None
                if sequence.status is not SequenceStatus.FINISHED:
                    sequence.num_computed_tokens = item.start
        if has_failed:
            self._planner.encoder.undo(step.plan for step in self._in_flight)
        self._in_flight.clear()
        self._live.release_ended(self._live.num_planned)
        self._running.departed += touched
        self._lose_evictions(evicting)
        for sequence in touched:
            if sequence.status is SequenceStatus.RUNNING:
                self._planner.roll_back(sequence)
        shares = [item for item in oldest.scheduled if item.sequence.status is SequenceStatus.RUNNING]
        return shares if self._blocks.states is None else restarted_shares(shares, self.config.max_num_batched_tokens)

    def _lose_evictions(self, sequences: Iterable[Sequence]) -> None:
        """Let sequences begin again of which it is not known whether their keys have turned.

        What fails a second time when it evicts is at fault itself.
        """
        for sequence in sequences:
            if sequence.status is not SequenceStatus.RUNNING:
                continue
            if sequence.has_lost_eviction:
                self.fail(sequence, "a step failed again in which the KV cache of the sequence was to be shortened")
                continue
            sequence.has_lost_eviction = True
            self._planner.admission.preempt(sequence)

    def schedule_again(self, items: Iterable[ScheduledSequence], now: float) -> ScheduledStep | None:
        """Plan a step of nothing but some of the shares that `roll_back` returned, without their drafts.

        Nothing was planned for these sequences since. No step may be in flight. Those whose deadline has passed end.
        The step is now in flight; None when none of the sequences runs any more. Where they need images, steps come
        first that encode nothing else, and schedule nothing: ask again with the same shares.
        """
        assert not self._in_flight
        self._expire(now)
        if not (running := [item for item in items if item.sequence.status is SequenceStatus.RUNNING]):
            return None
        step = self._planner.plan_again(self._live.num_planned + 1, running)
        self._live.add_step(step)
        return step

    def control_step(self, sequence: Sequence) -> ScheduledStep:
        """Return a step that any runner can compute: one token of a sequence that was never asked for.

        It is not in flight, and must be computed at once. It writes where the next token of `sequence` belongs, which
        must run, and end right after that.
        """
        control = control_share(sequence, self.config.block_size)
        self._live.num_planned = self._live.num_landed = step = self._live.num_planned + 1
        return self._planner.plan_control(step, control)

    def suspect_images(self, step: ScheduledStep) -> Sequence | None:
        """Suspect the images that a failed step encoded; return the sequence at fault, if the step was its suspect's.

        Images of a suspect are encoded by steps of their own, before anything else, as far as that step encoded them.
        """
        digests = {work.digest: work.end for work in step.plan.encodes}
        if not digests:
            return None
        suspects = self._planner.suspects
        for sequence in suspects if not step.scheduled else ():
            if sequence.status is SequenceStatus.RUNNING and digests.keys() <= {span.digest for span in sequence.media}:
                suspects.remove(sequence)
                return sequence
        holders = [each for each in self._running if any(span.digest in digests for span in each.media)]
        self._planner.suspect(holders, digests)
        return None

    def fail(self, sequence: Sequence, error: str) -> None:
        """End a sequence because it cannot be executed; the next `settle` or `take_events` reports it."""
        if sequence.status is not SequenceStatus.FINISHED:
            self._live.finish(sequence)
            self._events.append(SequenceEvent(sequence, (), sequence.num_output_tokens, "failed", error=error))

    def _expire(self, now: float) -> None:
        for sequence in self._deadlines.pop_expired(now):
            self._live.finish(sequence)
            self._events.append(SequenceEvent(sequence, (), sequence.num_output_tokens, "expired"))

    def take_events(self) -> list[SequenceEvent]:
        """Return the ends of sequences that no step has reported yet."""
        events, self._events = self._events, []
        return events

    def observe(self, step: ScheduledStep, result: StepResult, duration_s: float, now: float) -> None:
        """Learn how long the step took that has landed last, at `now` in monotonic seconds, and charge it."""
        if step.scheduled:
            self._throttle.landed(step, duration_s, now)
        num_drafted = 0 if self.speculation is None else sum([sampled.num_drafted for sampled in result.sampled])
        model = self._step_time
        if not step.plan.encodes:
            model.observe_step(step, num_drafted, duration_s)
        if self.config.media is not None and model.is_known:
            encoding_s = duration_s - model.low_step_s(step, num_drafted)
            self._planner.encoder.observe(step.plan.encodes, encoding_s, model.low_token_s, model.token_s)
        self._device_time.share(step, result, duration_s, now)

    def exchange_services(self, heard: Mapping[Lane, HeardServices]) -> Services:
        """Record what other workers have served to tenants, and return this worker's own report."""
        told: Services = {}
        for lane, queue in self._waiting.items():
            if lane in heard:
                queue.counters.hear(heard[lane])
            self._live.settle(lane, is_forced=True)
            if services := queue.counters.services():
                told[lane] = tuple(services)
        return told

    def emptied(self) -> Scheduler:
        """End all sequences without events, and return a scheduler with these settings that has cached nothing.

        What tenants were served stays.
        """
        for sequence in self.sequences:
            self.abort(sequence.id)
        emptied = Scheduler(self.config, self.speculation, self._constraints, self.tiers, self._images)
        for lane, queue in emptied._waiting.items():
            queue.counters = self._waiting[lane].counters
        return emptied

    def check_integrity(self) -> None:
        """Assert that blocks, counters and queues agree. Costs time in proportion to the pool; for tests and idle."""
        self._live.check_integrity()
