"""The real engine in virtual time: steps begin at one moment and land at another, and equal steps are taken at once.

Between two changes of a batch (a sequence comes, ends, or needs a block that is not there) the scheduler decides the
same in every step: each sequence decodes one token. `DecodeRun` is a run of such steps. What they do to sequences,
blocks and rates is applied when the run is over, and is what as many single steps would have done.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from gpu_worker.core.scheduler import Scheduler
from gpu_worker.core.scheduler_config import SchedulerConfig
from gpu_worker.core.step import ScheduledStep, SequenceEvent
from gpu_worker.engine.engine import Engine
from ops.simulation.clock import VirtualClock
from ops.simulation.timed_runner import TOKEN_ID, TimedRunner, TimedStep

_LEAST_STEPS = 3
"""Shorter runs cost more than their steps."""
_FIRST_STEPS, _MOST_STEPS = 8, 512


@dataclass(slots=True)
class DecodeRun:
    """Steps of the same decodes, one after another.

    Attributes:
        began: When the first one began.
        ends: When each lands.
        devices_s: The device's seconds of each.
        num_decodes: Sequences in each.
        num_steps: Steps that will be taken: all, or up to the one during which something came.
        num_applied: Steps whose effect has been applied.
    """

    began: float
    ends: list[float]
    devices_s: list[float]
    num_decodes: int
    num_steps: int
    num_applied: int = 0

    @property
    def due(self) -> float:
        """When the last step lands."""
        return self.ends[self.num_steps - 1]

    def cut(self, now: float) -> None:
        """End the run with the step that is under way."""
        self.num_steps = min(self.num_steps, bisect_left(self.ends, now) + 1)

    def num_landed(self, now: float) -> int:
        """Return how many steps have landed."""
        return min(self.num_steps, bisect_right(self.ends, now))


class EngineLoad(NamedTuple):
    """What heartbeats say of an engine's load."""

    running: int
    waiting: int
    waiting_tokens: int
    free_blocks: int
    prefill_rate: float
    decode_rate: float


class RunScheduler(Scheduler):
    """The scheduler, which also takes many equal steps at once."""

    @property
    def num_waiting(self) -> int:
        """Sequences that wait."""
        return len(self._waiting["interactive"]) + len(self._waiting["batch"])

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens to compute of those that wait, and of prompts under way."""
        return self._num_waiting_tokens

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be handed out."""
        return self._blocks.num_free

    @property
    def num_running(self) -> int:
        """Sequences that hold a slot."""
        return len(self._running)

    def num_equal_steps(self, most: int) -> int:
        """Return for how many steps, `most` at most, nothing but the decodes of now can happen if nothing comes."""
        running, live = self._running, self._live
        decoding = running.decoding["interactive"]
        if (
            not decoding
            or len(decoding) != len(running)
            or len(live) != len(running)
            or self._in_flight
            or self._events
            or self._blocks.rules
            or running.num_needing_last_token
            or any(len(each.token_ids) == each.num_prompt_tokens for each in decoding.values())
        ):
            return 0
        steps = min([most, *[each.max_num_tokens - len(each.token_ids) - 1 for each in decoding.values()]])
        return steps if steps >= _LEAST_STEPS and self.num_new_blocks(steps) <= self._blocks.pool.num_available else 0

    def decode_context(self) -> int:
        """Return how many tokens the decodes of the next step attend to, over all of them."""
        return sum([each.num_computed_tokens + 1 for each in self._running.decoding["interactive"].values()])

    def num_new_blocks(self, steps: int) -> int:
        """Return how many more blocks the running sequences need for this many decode steps."""
        size, new = self.config.block_size, 0
        for each in self._running.decoding["interactive"].values():
            count = (each.num_computed_tokens + steps - 1) // size + 1 - len(each.block_table)
            if count > 0:
                new += count
        return new

    def take_equal_steps(self, steps: int) -> None:
        """Advance all running sequences by this many equal decode steps, and take the blocks for them."""
        decodes = list(self._running.decoding["interactive"].values())
        # As the plan of the last step has it: blocks for the token that comes next are taken when that is planned.
        tokens = [TOKEN_ID] * (steps - 1)
        for each in decodes:
            each.num_computed_tokens += steps - 1
            each.token_ids += tokens
        has_grown = self._blocks.try_grow(decodes)
        assert has_grown, "a run is no longer than the blocks last"
        due = self._running.due["interactive"]
        for each in decodes:
            each.num_computed_tokens += 1
            each.token_ids.append(TOKEN_ID)
            each.next_boundary = each.next_publish = 0
            due[each.id] = each
        self._blocks.publish([(each, each.num_computed_tokens) for each in decodes])
        self._live.num_planned = self._live.num_landed = self._live.num_landed + steps


class VirtualEngine(Engine):
    """The engine, whose steps land when the clock says so.

    Attributes:
        run: The decode run under way; None while single steps are taken.
    """

    def __init__(self, config: SchedulerConfig, runner: TimedRunner, clock: VirtualClock, *, takes_runs: bool) -> None:
        """Start without any sequence; with `takes_runs`, equal steps are computed at once."""
        scheduler = RunScheduler(config)
        super().__init__(scheduler, runner, clock.time)
        self._run_scheduler = scheduler
        self._timed = runner
        self._takes_runs = takes_runs
        self._most_steps = _FIRST_STEPS
        self.run: DecodeRun | None = None

    def submit(self) -> tuple[float, ScheduledStep] | None:
        """Begin a step; return when it is due, and what it computes. None where there is nothing to do."""
        if not self._submit_next() and not self._in_flight:
            return None
        flight = self._in_flight[-1]
        due = flight.pending.due if isinstance(flight.pending, TimedStep) else self._clock()
        return due, flight.step

    def land(self) -> list[SequenceEvent]:
        """Apply the step in flight, which is due."""
        pending = self._in_flight[0].pending
        if isinstance(pending, TimedStep):
            self._timed.device_s += pending.device_s
        return super().land()

    def begin_run(self) -> DecodeRun | None:
        """Begin a run of equal steps; None where single steps are to be taken."""
        scheduler = self._run_scheduler
        most = scheduler.num_equal_steps(self._most_steps) if self._takes_runs else 0
        if not most:
            return None
        began = now = self._clock()
        num_decodes, context, number = scheduler.num_running, scheduler.decode_context(), scheduler.step
        ends, devices_s = [], []
        for _ in range(most):
            number += 1
            device_s, step_s = self._timed.seconds(number, num_decodes, context, [])
            now += step_s
            context += num_decodes
            ends.append(now)
            devices_s.append(device_s)
        self.run = DecodeRun(began, ends, devices_s, num_decodes, most)
        return self.run

    def settle_run(self) -> list[float]:
        """Apply the steps of the run that have landed since the last call, and return how long each took."""
        run = self.run
        assert run is not None
        first, landed = run.num_applied, run.num_landed(self._clock())
        if landed == first:
            return []
        self._run_scheduler.take_equal_steps(landed - first)
        self._timed.device_s += sum(run.devices_s[first:landed])
        times = [run.began if first == 0 else run.ends[first - 1], *run.ends[first:landed]]
        gaps = [end - begin for begin, end in pairwise(times)]
        config = self._run_scheduler.config
        for gap in gaps:
            self._rates.observe(
                num_prefilled=0,
                num_generated=run.num_decodes,
                is_full=run.num_decodes >= config.max_num_batched_tokens,
                is_batch_full=run.num_decodes >= config.max_num_seqs,
                duration_s=gap,
            )
        self._landed_at, run.num_applied = times[-1], landed
        if landed == run.num_steps:
            # Steps that are drawn and not taken cost time.
            self._most_steps = min(_MOST_STEPS, max(_FIRST_STEPS, 2 * landed))
            self.run = None
        return gaps

    @property
    def load(self) -> EngineLoad:
        """What a heartbeat of now says: of a run as if its steps had been taken one by one."""
        scheduler, run, rates = self._run_scheduler, self.run, self._rates
        free = scheduler.num_free_blocks
        if run is not None:
            # Those of the step under way are taken.
            steps = min(run.num_landed(self._clock()) + 1, run.num_steps) - run.num_applied
            free -= scheduler.num_new_blocks(steps)
        waiting, tokens = scheduler.num_waiting, scheduler.num_waiting_tokens
        return EngineLoad(scheduler.num_running, waiting, tokens, free, rates.prefill, rates.decode)
