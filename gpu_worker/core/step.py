"""What passes between scheduler, model runner and consumer in one step: plan, result, events. Values only."""

from __future__ import annotations

from dataclasses import dataclass, field

from gpu_worker.core.sequence import Sequence
from shared.messages import FinishReason


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """One sequence's share of a step.

    The runner computes tokens `start : start + num_tokens` of `sequence.token_ids`, writes their KV into the blocks of
    `sequence.block_table` (which already covers them), and samples a token when `samples`.

    Attributes:
        start: `num_computed_tokens` when the step was planned.
        num_tokens: Tokens to compute in this step (`num_scheduled_tokens`), at least one.
        samples: True when the step reaches the sequence's last known token.
    """

    sequence: Sequence
    start: int
    num_tokens: int
    samples: bool


@dataclass(frozen=True, slots=True)
class StepPlan:
    """All work of one step. `scheduled` lists decodes first.

    Attributes:
        step: Step number, from 1.
        num_tokens: Sum of the scheduled tokens.
        preempted: Sequences that lost their blocks before this step.
    """

    step: int
    scheduled: list[ScheduledSequence]
    num_tokens: int
    preempted: list[Sequence] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class LogprobEntry:
    """Log probability of one token and of the most likely alternatives, as ids (text is added above the engine)."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """What the runner made for one scheduled sequence: one token, or none when it does not sample yet.

    Attributes:
        token_ids: New tokens in order; more than one once speculation is on.
        logprobs: One entry per new token when the request asked for them, else empty.
        prompt_logprobs: Entries for prompt positions `start + 1 … start + num_tokens` that lie in the prompt, when asked.
    """

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[LogprobEntry, ...] = ()
    prompt_logprobs: tuple[LogprobEntry, ...] = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    """Outcome of a step: `sampled[i]` belongs to `plan.scheduled[i]`."""

    step: int
    sampled: list[SampledTokens]


@dataclass(frozen=True, slots=True)
class SequenceEvent:
    """What a step did to one sequence, for the consumer.

    Attributes:
        token_ids: New output tokens, the end-of-sequence token included (it counts in usage, but has no text).
        num_tokens_before: Output tokens before this event (the delta's `seq`).
        finish: Set once, in the sequence's last event.
    """

    sequence: Sequence
    token_ids: tuple[int, ...]
    num_tokens_before: int
    finish: FinishReason | None = None
    logprobs: tuple[LogprobEntry, ...] = ()
    prompt_logprobs: tuple[LogprobEntry, ...] = ()
