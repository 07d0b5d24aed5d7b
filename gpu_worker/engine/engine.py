"""The step: schedule → submit → settle. The engine joins a scheduler and a model runner, and measures them.

Owns both, and the steps in flight; knows neither threads nor NATS. While the device computes one step, the engine
settles the step before, and plans and submits the next, as far as the runner allows.

When the runner raises, the step is undone and computed again in smaller groups, so that the sequence at fault fails
alone. The others lose and repeat no token, because tokens depend on seed and position only. When the runner can compute
nothing at all, the engine is broken, and the worker exits.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import Callable

from msgspec import Struct, structs

from gpu_worker.core.first_tokens import StepUnderWay
from gpu_worker.core.isolation import Isolation
from gpu_worker.core.model_runner import BrokenRunnerError, InvalidLogitsError, ModelRunner, PendingStep, RefusedStep
from gpu_worker.core.scheduler import Scheduler
from gpu_worker.core.scheduler_config import SchedulerStats
from gpu_worker.core.sequence import Sequence, SequenceStatus
from gpu_worker.core.step import CompletedStep, ScheduledStep, SequenceEvent, StepResult
from gpu_worker.core.step_interrupt import StepGivenUpError, StepInterrupt
from shared.worker_metrics import StepCounts

_MEMORY_S = 2.0
"""Time constant: busy seconds after which a measurement has lost most of its weight."""


class Rate:
    """Units per busy second, averaged with exponential forgetting; 0 while unknown."""

    def __init__(self) -> None:
        self._units = 0.0
        self._seconds = 0.0

    @property
    def value(self) -> float:
        """Units per second."""
        return self._units / self._seconds if self._seconds > 0 else 0.0

    def observe(self, units: float, duration_s: float) -> None:
        """Add what one step did."""
        keep = math.exp(-duration_s / _MEMORY_S)
        self._units = self._units * keep + units
        self._seconds = self._seconds * keep + duration_s


class StepRates:
    """Rates as heartbeats report them; each is 0 until it was measured.

    Attributes:
        prefill: Prompt tokens per second that the engine can do, next to the decodes that it was doing.
        decode: Generated tokens per second of a batch as full as it can be.
    """

    def __init__(self) -> None:
        self.prefill, self.decode = Rate(), Rate()

    def observe(
        self, *, num_prefilled: int, num_generated: int, is_full: bool, is_batch_full: bool, duration_s: float
    ) -> None:
        """Add one step.

        Args:
            num_prefilled: Prompt tokens computed.
            num_generated: Tokens sampled.
            is_full: The step had as many tokens as a step may have. A step that ran out of prompts only shows a lower
                bound of the prefill rate: it may raise the estimate, never lower it, and is not an estimate by itself.
            is_batch_full: No more sequences could run. A smaller batch shows a lower bound of the decode rate likewise.
            duration_s: Wall time of the step.
        """
        if duration_s <= 0:
            return
        if num_prefilled and (is_full or 0 < self.prefill.value < num_prefilled / duration_s):
            self.prefill.observe(num_prefilled, duration_s)
        if num_generated and (is_batch_full or 0 < self.decode.value < num_generated / duration_s):
            self.decode.observe(num_generated, duration_s)


MAX_CONTROL_STEPS = 3
"""Attempts at a step that any runner can compute, before the runner counts as broken."""


class _Flight(Struct, frozen=True):
    step: ScheduledStep
    pending: PendingStep
    started: float
    is_retry: bool
    under_way: StepUnderWay | None


class EngineStats(SchedulerStats, frozen=True, kw_only=True):
    """A snapshot of the engine after a step, for heartbeats, metrics and what the consumer may pull.

    Attributes:
        prefill_rate: Tokens per second, measured in full steps; 0 while unknown.
        decode_rate: Tokens per second; 0 while unknown.
        is_fatal: The runner or the engine broke down; the process should end with an error.
    """

    step: int
    max_num_seqs: int
    prefill_rate: float
    decode_rate: float
    num_failed_steps: int
    is_fatal: bool
    spec_decode_num_drafts: int = 0
    spec_decode_num_draft_tokens: int = 0
    spec_decode_num_accepted_tokens: int = 0

    @property
    def expected_prefill_rate(self) -> float:
        """Tokens per second that a prompt will be computed at; short prompts fill no step that could be measured."""
        return self.prefill_rate or self.full_step_rate


class Engine:
    """Not thread safe.

    Attributes:
        scheduler: Another one after a restart.
        last_error: What the runner raised in the step that landed last, None when it succeeded.
        counts: What all steps did, for metrics; other threads may read it.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        clock: Callable[[], float] = time.monotonic,
        interrupt: StepInterrupt | None = None,
    ) -> None:
        """Join them; `interrupt` gives up a step that the runner computes, None where it cannot."""
        self.scheduler, self._tiers = scheduler, scheduler.tiers
        self._runner, self._clock, self._interrupt = runner, clock, interrupt
        self._under_way: StepUnderWay | None = None
        self._rates = StepRates()
        self._in_flight: deque[_Flight] = deque()
        self._isolation = Isolation()
        self._landed_at = -math.inf
        self._num_failed_steps = 0
        self._is_broken = False
        self._leaving: list[tuple[Sequence, Callable[[Sequence], None]]] = []
        self.last_error: Exception | None = None
        self.counts = StepCounts()

    @property
    def stats(self) -> EngineStats:
        """Count what runs, waits and is free, and how fast it goes."""
        speculation = self.scheduler.speculation
        return EngineStats(
            **structs.asdict(self.scheduler.stats),
            step=self.scheduler.step,
            max_num_seqs=self.scheduler.config.max_num_seqs,
            prefill_rate=self._rates.prefill.value,
            decode_rate=self._rates.decode.value,
            num_failed_steps=self._num_failed_steps,
            is_fatal=self._is_broken,
            spec_decode_num_drafts=0 if speculation is None else speculation.num_drafts,
            spec_decode_num_draft_tokens=0 if speculation is None else speculation.num_draft_tokens,
            spec_decode_num_accepted_tokens=0 if speculation is None else speculation.num_accepted_tokens,
        )

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence; see `Scheduler.add`."""
        self.scheduler.add(sequence)

    def make_way(self, sequence: Sequence) -> None:
        """Give up the step under way if a sequence, which is about to be added, would wait for long for its end.

        Any thread may call it.
        """
        step, interrupt = self._under_way, self._interrupt
        if step is None or interrupt is None:
            return
        if self.scheduler.first_tokens.is_worth_giving_up(step, sequence, self._clock()):
            interrupt.ask(step.step)

    def abort(self, sequence_id: str) -> Sequence | None:
        """Drop a sequence without an event; None when it is not here (any more)."""
        return self.scheduler.abort(sequence_id)

    def hand_over(self, sequence_id: str, done: Callable[[Sequence], None]) -> None:
        """Drop a sequence as `abort` does, and call `done` when its blocks are given back and copied to lower tiers."""
        sequence = self.scheduler.abort(sequence_id)
        if sequence is not None:
            self._leaving.append((sequence, done))
            self._let_leave()

    def _let_leave(self) -> None:
        gone = [each for each in self._leaving if not each[0].block_table]
        if not gone:
            return
        self._leaving = [each for each in self._leaving if each[0].block_table]
        if self._tiers is not None:
            self._tiers.flush()
        for sequence, done in gone:
            done(sequence)

    def give_up(self) -> None:
        """Declare the engine broken. Its sequences get no event: they are left to other workers."""
        self._is_broken = True

    def restart(self) -> None:
        """Drop all sequences without events, and whatever is cached: the runner has lost it."""
        self._in_flight.clear()
        self._isolation = Isolation()
        self._leaving.clear()
        if self._interrupt is not None:
            self._interrupt.clear()
        self.scheduler = self.scheduler.emptied()

    def has_work(self) -> bool:
        """Return whether there is something to compute, to land or to report."""
        return self.scheduler.has_work()

    @property
    def pause_s(self) -> float:
        """Seconds for which it is better to wait for something new than to step."""
        if self._in_flight or self._isolation.is_active:
            return 0.0
        return self.scheduler.pause_s(self._clock())

    @property
    def num_steps_in_flight(self) -> int:
        """Steps that were submitted and have not landed."""
        return len(self._in_flight)

    def step(self) -> list[SequenceEvent]:
        """Submit as many steps as the runner takes, land the oldest and return what it did to each sequence.

        `BrokenRunnerError` if the runner can compute nothing any more.
        """
        while len(self._in_flight) < self._runner.max_steps_in_flight and self._submit_next():
            pass
        return self.land()

    def land(self) -> list[SequenceEvent]:
        """Wait for the oldest step in flight and return what it did to each sequence; submit nothing."""
        flight = self._in_flight.popleft()
        step = flight.step
        self.last_error = None
        try:
            result = flight.pending.result()
            if len(result.sampled) != len(step.scheduled):
                raise RuntimeError(f"runner answered {len(result.sampled)} of {len(step.scheduled)} sequences")
        except BrokenRunnerError:
            raise
        except StepGivenUpError as error:
            # A step that could not be interrupted has failed, so more than its blocks must be undone.
            return self._undo(step, error) if flight.under_way is None else self._begin_again(flight.under_way)
        except Exception as error:
            return self._undo(step, error)
        if _is_all_invalid(step, result):
            return self._undo(step, InvalidLogitsError())
        events = self.scheduler.settle(step, result)
        if not step.is_empty:
            self._measure(flight, result, events)
        if self._tiers is not None and not self.has_work():
            # No step follows that would do it.
            self._tiers.flush()
        if self._leaving:
            self._let_leave()
        return events

    def _begin_again(self, under_way: StepUnderWay) -> list[SequenceEvent]:
        """Undo a step that was given up. It was in flight alone, and what it computed is planned anew."""
        self._landed_at = self._clock()
        self.scheduler.first_tokens.give_up(under_way, self._landed_at)
        self.scheduler.roll_back(has_failed=False)
        self._let_leave()
        return self.scheduler.take_events()

    def _undo(self, step: ScheduledStep, error: Exception) -> list[SequenceEvent]:
        """Undo the oldest step, which failed, and those behind it; prepare to compute its shares again."""
        self.last_error = error
        self._num_failed_steps += 1
        for later in self._in_flight:
            # Their results are void, because they build on the failed step. But the device must be done with their
            # blocks.
            with contextlib.suppress(Exception):
                later.pending.result()
        self._in_flight.clear()
        self._landed_at = self._clock()
        suspect = self._isolation.split(self.scheduler.roll_back())
        suspect = suspect or self.scheduler.suspect_images(step)
        if suspect is not None:
            self._fail_suspect(suspect, error)
        self._let_leave()
        return self.scheduler.take_events()

    def _fail_suspect(self, sequence: Sequence, error: Exception) -> None:
        if not self._isolation.is_runner_proven:
            self._prove_runner(sequence, error)
        self.scheduler.fail(sequence, f"{type(error).__name__}: {error}")

    def _prove_runner(self, sequence: Sequence, error: Exception) -> None:
        """Let the runner compute a control step in place of this sequence; it fails only if the runner is broken."""
        for _ in range(MAX_CONTROL_STEPS):
            step = self.scheduler.control_step(sequence)
            with contextlib.suppress(Exception):
                result = self._submit(step).result()
                if all(sampled.error is None for sampled in result.sampled):
                    self._isolation.is_runner_proven = True
                    return
        raise BrokenRunnerError(error) from error

    def _submit_next(self) -> bool:
        if self._in_flight and (self._isolation.is_active or isinstance(self._in_flight[-1].pending, RefusedStep)):
            # The next step would build on a token that the device may never have sampled.
            return False
        started = self._clock()
        step = self._next_step(started)
        if step is None:
            return False
        pending: PendingStep = CompletedStep(StepResult(step.step, []))
        under_way = None
        if not step.is_empty:
            try:
                if self._interrupt is not None and step.num_decodes < len(step.scheduled):
                    self._under_way = self._may_be_given_up(step, started)
                pending = self._submit(step)
            except Exception as error:
                pending = RefusedStep(error)
            under_way, self._under_way = self._under_way, None
        self._in_flight.append(_Flight(step, pending, started, self._isolation.is_active, under_way))
        return not step.is_empty

    def _may_be_given_up(self, step: ScheduledStep, now: float) -> StepUnderWay | None:
        # What drafts for a sequence would have to read all of it again.
        has_drafted = self.scheduler.speculation is not None and step.num_decodes > 0
        return None if self._isolation.is_active or has_drafted else self.scheduler.first_tokens.under_way(step, now)

    def _submit(self, step: ScheduledStep) -> PendingStep:
        if self._tiers is not None:
            self._tiers.prefill_rate = self._rates.prefill.value or self.scheduler.full_step_rate
            self._tiers.flush()
        return self._runner.submit(step.plan)

    def _next_step(self, now: float) -> ScheduledStep | None:
        while self._isolation.is_active:
            group = self._isolation.next_group()
            if group is not None and (step := self.scheduler.schedule_again(group, now)) is not None:
                if not step.scheduled:
                    self._isolation.put_back(group)
                return step
        return self.scheduler.schedule(now)

    def _measure(self, flight: _Flight, result: StepResult, events: list[SequenceEvent]) -> None:
        step, config, speculation = flight.step, self.scheduler.config, self.scheduler.speculation
        # A step that was submitted behind another one has had the device only since that one landed.
        began, self._landed_at = max(flight.started, self._landed_at), self._clock()
        duration_s = self._landed_at - began
        num_generated = sum([len(event.token_ids) for event in events])
        num_prefilled = step.num_prefilled if step.num_tokens > step.num_decodes else 0
        self.counts.observe(step.num_tokens, num_prefilled, num_generated, duration_s)
        self._rates.observe(
            num_prefilled=num_prefilled,
            num_generated=num_generated,
            is_full=step.num_tokens >= config.max_num_batched_tokens,
            is_batch_full=self.scheduler.is_saturated_by(step),
            duration_s=duration_s,
        )
        if flight.is_retry:
            self._isolation.is_runner_proven = True
        elif speculation is not None and step.scheduled and step.num_decodes == len(step.scheduled):
            num_drafted = sum([sampled.num_drafted for sampled in result.sampled])
            speculation.policy.time(step.num_decodes, num_drafted, duration_s)
        self.scheduler.observe(step, result, duration_s, self._landed_at)


def _is_all_invalid(step: ScheduledStep, result: StepResult) -> bool:
    """Return whether all results are errors: then the runner may be at fault rather than the sequences."""
    has_error = False
    for item, sampled in zip(step.scheduled, result.sampled, strict=True):
        if sampled.error is None:
            if sampled.token_ids or sampled.pooled is not None:
                return False
        elif item.sequence.status is SequenceStatus.RUNNING:
            has_error = True
    return has_error
