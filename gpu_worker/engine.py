"""The step: schedule → execute → settle. The engine joins a scheduler and a model runner, and measures them.

Owns both; knows neither threads nor NATS. A runner that raises fails the sequences of that step and no others; one that
keeps raising makes the engine report itself as fatally failed, for the worker to exit.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from msgspec import Struct

from gpu_worker.core.scheduler import Scheduler
from gpu_worker.core.sequence import Sequence
from gpu_worker.core.step import SequenceEvent, StepPlan, StepResult
from gpu_worker.rates import StepRates

MAX_CONSECUTIVE_FAILURES = 3


class PendingStep(Protocol):
    """A submitted step."""

    def result(self) -> StepResult:
        """Wait until the step's tokens are on the host; raise what the step raised."""
        ...


class ModelRunner(Protocol):
    """Executes plans, in the order in which they are submitted.

    It reads sequences in `submit` only, and writes nothing but `Sequence.row`, which stays the same while the sequence
    is in the batch. It drops what it keeps for `plan.departed` before anything that can fail.
    """

    @property
    def max_steps_in_flight(self) -> int:
        """Steps that may be submitted before the first of them has a result; 1 when `submit` computes at once."""
        ...

    def submit(self, plan: StepPlan) -> PendingStep:
        """Start to compute the plan's tokens and to sample; called only with a plan that schedules something.

        A token of an item that is not in `sequence.token_ids` yet is the one sampled last for the sequence, by a step
        that is still in flight. The token that an item samples is number `start + num_tokens - num_prompt_tokens` of
        the output.
        """
        ...


class EngineStats(Struct, frozen=True, kw_only=True):
    """A snapshot of the engine after a step, for heartbeats, metrics and the consumer's appetite.

    Attributes:
        step: Completed steps.
        waiting_tokens: Tokens known and not computed yet, of waiting and running sequences.
        free_blocks: Blocks that can be handed out, those with findable content included.
        prefill_rate: Tokens per second; 0 while unknown.
        decode_rate: Tokens per second; 0 while unknown.
        is_fatal: The runner keeps failing, or the engine broke down; the process should end with an error.
    """

    step: int
    running: int
    running_batch: int
    waiting: int
    waiting_batch: int
    waiting_tokens: int
    free_blocks: int
    total_blocks: int
    max_num_seqs: int
    num_preemptions: int
    num_prefix_queries: int
    num_prefix_hits: int
    prefill_rate: float
    decode_rate: float
    num_failed_steps: int
    is_fatal: bool


class Engine:
    """Not thread safe: one thread calls everything but `validate`.

    Attributes:
        last_error: What the runner raised in the last step, None when it succeeded.
    """

    def __init__(self, scheduler: Scheduler, runner: ModelRunner, clock: Callable[[], float] = time.monotonic) -> None:
        """Drive `runner` by `scheduler`; `clock` gives the monotonic seconds that arrivals and deadlines are in."""
        self._scheduler = scheduler
        self._runner = runner
        self._clock = clock
        self._rates = StepRates()
        self._consecutive_failures = 0
        self._num_failed_steps = 0
        self._is_broken = False
        self.last_error: Exception | None = None

    @property
    def stats(self) -> EngineStats:
        """Count what runs, waits and is free, and how fast it goes."""
        counts = self._scheduler.stats
        return EngineStats(
            step=self._scheduler.step,
            running=counts.running,
            running_batch=counts.running_batch,
            waiting=counts.waiting,
            waiting_batch=counts.waiting_batch,
            waiting_tokens=counts.waiting_tokens,
            free_blocks=counts.free_blocks,
            total_blocks=counts.total_blocks,
            max_num_seqs=self._scheduler.config.max_num_seqs,
            num_preemptions=counts.num_preemptions,
            num_prefix_queries=counts.num_prefix_queries,
            num_prefix_hits=counts.num_prefix_hits,
            prefill_rate=self._rates.prefill,
            decode_rate=self._rates.decode,
            num_failed_steps=self._num_failed_steps,
            is_fatal=self._is_broken or self._consecutive_failures >= MAX_CONSECUTIVE_FAILURES,
        )

    def validate(self, sequence: Sequence) -> None:
        """Refuse a sequence that could never run. Any thread may call it.

        Raises:
            PromptTooLongError: The prompt leaves no room for a generated token.
            BadRequestError: The prompt is empty.
        """
        self._scheduler.validate(sequence)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence.

        Raises:
            PromptTooLongError: The prompt leaves no room for a generated token.
            BadRequestError: The prompt is empty.
            DuplicateSequenceError: Its id is in use.
        """
        self._scheduler.add(sequence)

    def abort(self, sequence_id: str) -> Sequence | None:
        """Drop a sequence without an event; None when it is not here (any more)."""
        return self._scheduler.abort(sequence_id)

    @property
    def sequences(self) -> list[Sequence]:
        """The sequences that have not finished, best first."""
        return self._scheduler.sequences

    def give_up(self, error: Exception) -> list[SequenceEvent]:
        """Declare the engine broken beyond repair; return a last event for every sequence that it holds."""
        self._is_broken = True
        message = f"{type(error).__name__}: {error}"
        return [SequenceEvent(s, (), s.num_output_tokens, "failed", error=message) for s in self.sequences]

    def has_work(self) -> bool:
        """Say whether a step would compute something or report an event."""
        return self._scheduler.has_work()

    def step(self) -> list[SequenceEvent]:
        """Compute one step and return what it did to each sequence."""
        self.last_error = None
        started = self._clock()
        plan = self._scheduler.schedule(started)
        if not plan.scheduled:
            return self._scheduler.settle(plan, StepResult(plan.step, []))
        try:
            result = self._runner.submit(plan).result()
            if len(result.sampled) != len(plan.scheduled):
                raise RuntimeError(f"runner answered {len(result.sampled)} of {len(plan.scheduled)} sequences")
        except Exception as error:
            self.last_error = error
            self._consecutive_failures += 1
            self._num_failed_steps += 1
            return self._scheduler.fail(plan, f"{type(error).__name__}: {error}")
        self._consecutive_failures = 0
        events = self._scheduler.settle(plan, result)
        self._measure(plan, events, self._clock() - started)
        return events

    def _measure(self, plan: StepPlan, events: list[SequenceEvent], duration_s: float) -> None:
        num_generated = sum([len(event.token_ids) for event in events])
        # Every sampling sequence computes one token for the one that it samples; what is more is prefill.
        num_prefilled = plan.num_tokens - sum([item.samples for item in plan.scheduled])
        config = self._scheduler.config
        self._rates.observe(
            num_prefilled=num_prefilled,
            num_generated=num_generated,
            is_full=plan.num_tokens >= config.max_num_batched_tokens,
            is_batch_full=len(plan.scheduled) >= config.max_num_seqs or self._scheduler.num_waiting > 0,
            duration_s=duration_s,
        )
