"""A model runner without a model: one token per sampling sequence every `step_ms`, and longer steps for more work.

It leaves everything else real (scheduler, blocks, frames, queue, gateway), so that their cost and their behaviour under
load can be measured on any machine. Imports no torch.
"""

from __future__ import annotations

import math
import random
import time
from array import array
from collections.abc import Callable
from collections.abc import Sequence as Values
from dataclasses import dataclass
from hashlib import sha256

from gpu_worker.core.batch_sequences import BatchSequences, Share
from gpu_worker.core.constraint import ConstraintSource
from gpu_worker.core.model_runner import PendingStep
from gpu_worker.core.plan import StepPlan
from gpu_worker.core.pooling import PoolingPlan
from gpu_worker.core.step import CompletedStep, LogprobEntry, SampledTokens, StepResult
from gpu_worker.core.step_interrupt import StepGivenUpError, StepInterrupt

DEFAULT_GROWTH = 0.005
"""About what another sequence or prompt token adds to a step of an 8B model on an H100: 0.03 ms to 6 ms."""

_NO_TOKENS = SampledTokens()
_MASK = 2**64 - 1


class SimulatedRunner:
    """Paces steps by an absolute schedule and makes tokens that depend only on the request's seed and the position.

    A step of one decode takes `step_ms`; every further token of the step, of another sequence or of a prompt, adds the
    share `growth` of that. A step that is late is followed by a shorter one, so the rate holds; after a pause (idle, or
    more than one step late) the schedule starts anew.
    """

    def __init__(
        self,
        step_ms: float,
        token_ids: Values[int],
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        *,
        growth: float = DEFAULT_GROWTH,
        hidden_size: int = 1,
        constraints: ConstraintSource | None = None,
        num_stages: int = 1,
        interrupt: StepInterrupt | None = None,
    ) -> None:
        """Emit tokens of `token_ids` only, the caller having left out special ones; `step_ms` 0 does not wait.

        Vectors have `hidden_size` numbers, and depend on the prompt only. Sequences with a grammar have their
        constraints from `constraints`. Of several stages each takes its part of a step's time, and as many steps may
        be in flight: each stage computes them one after another. A step that `interrupt` asks to end is given up.
        """
        assert step_ms >= 0
        assert growth >= 0
        assert len(token_ids) > 0
        self._sequences = BatchSequences(constraints)
        self._step_s = step_ms / 1000
        self._growth = growth
        self._hidden_size = hidden_size
        self._clock = clock
        self._interrupt = interrupt
        self._sleep = sleep if interrupt is None else interrupt.sleep
        self._due = [-math.inf] * num_stages
        self.max_steps_in_flight = num_stages
        self._sampled = [SampledTokens((token_id,)) for token_id in token_ids]
        self._logprob = -math.log(len(token_ids))

    def submit(self, plan: StepPlan) -> PendingStep:
        """Make a token for each sampling sequence, there when due; `StepGivenUpError` if `interrupt` asked for it."""
        if self._interrupt is not None:
            self._interrupt.begin(plan.step)
        self._sequences.apply(plan)
        sampled = [self._sample(item) for item in self._sequences.shares(plan)]
        result = StepResult(plan.step, sampled)
        if not self._step_s:
            return CompletedStep(result)
        due = self._schedule(self._step_s * (1.0 + self._growth * max(0, plan.num_tokens - 1)))
        pending = _TimedStep(result, due, self._clock, self._sleep)
        if len(self._due) > 1:
            return pending
        try:
            return CompletedStep(pending.result())
        except StepGivenUpError:
            self._due = [-math.inf]
            raise

    def _sample(self, item: Share) -> SampledTokens:
        sequence = item.sequence
        if sequence.pooling is not None:
            return self._pooled(item, sequence.pooling)
        sampling = sequence.sampling
        sampled = _NO_TOKENS
        if item.samples:
            position = item.start + item.num_tokens - sequence.num_prompt_tokens
            mixed = (position * 0x9E3779B97F4A7C15 ^ sampling.seed) & _MASK
            mixed = (mixed ^ mixed >> 29) * 0xBF58476D1CE4E5B9 & _MASK
            if sequence.constraint is None:
                sampled = self._sampled[(mixed >> 32) % len(self._sampled)]
            else:
                sampled = SampledTokens((sequence.constraint.some_allowed(mixed >> 32),))
        if sampling.logprobs is None and sampling.prompt_logprobs is None:
            return sampled
        return self._with_logprobs(item, sampled)

    def _pooled(self, item: Share, plan: PoolingPlan) -> SampledTokens:
        """Report all of the answer when the prompt is complete."""
        token_ids = item.sequence.token_ids
        if item.start + item.num_tokens < len(token_ids):
            return _NO_TOKENS
        width = {"hidden": self._hidden_size, "classes": 1}.get(str(plan.readout), len(plan.readout))
        numbers = random.Random(sha256(array("q", token_ids).tobytes()).digest())
        return SampledTokens(pooled=array("d", [numbers.uniform(-1.0, 1.0) for _ in range(width)]).tobytes())

    def _with_logprobs(self, item: Share, sampled: SampledTokens) -> SampledTokens:
        sequence = item.sequence
        logprobs: tuple[LogprobEntry, ...] = ()
        prompt_logprobs: tuple[LogprobEntry, ...] = ()
        if sequence.sampling.logprobs is not None:
            num_top, listed = sequence.sampling.logprobs, sequence.sampling.logprob_token_ids
            logprobs = tuple(self._entry(token_id, num_top, listed) for token_id in sampled.token_ids)
        if sequence.sampling.prompt_logprobs is not None:
            end = min(item.start + item.num_tokens + 1, sequence.num_prompt_tokens)
            prompt = sequence.token_ids[item.start + 1 : end]
            prompt_logprobs = tuple(self._entry(token_id, sequence.sampling.prompt_logprobs) for token_id in prompt)
        return SampledTokens(sampled.token_ids, logprobs, prompt_logprobs)

    def _entry(self, token_id: int, num_top: int, listed: tuple[int, ...] = ()) -> LogprobEntry:
        others = listed or [other.token_ids[0] for other in self._sampled[:num_top]]
        return LogprobEntry(token_id, self._logprob, tuple((other, self._logprob) for other in others))

    def _schedule(self, step_s: float) -> float:
        """Return when a step is due that begins now, or when those before it allow."""
        now, stage_s = self._clock(), step_s / len(self._due)
        begin = -math.inf
        for stage, due in enumerate(self._due):
            # A stage of several waits for those before it: it cannot make up for time.
            is_late = now - due > step_s or len(self._due) > 1
            begin = self._due[stage] = max(begin, due, now if is_late else due) + stage_s
        return begin


@dataclass(frozen=True, slots=True)
class _TimedStep:
    """A step whose result is there at a time, in seconds of the clock."""

    step: StepResult
    due: float
    clock: Callable[[], float]
    sleep: Callable[[float], None]

    def result(self) -> StepResult:
        """Wait for it."""
        left = self.due - self.clock()
        if left > 0:
            self.sleep(left)
        return self.step
