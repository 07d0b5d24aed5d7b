"""A step as the scheduler keeps it until it lands, and what comes of it: results and events.

They are msgspec Structs though they never leave the process: several are made per sequence and step, and a frozen
Struct costs 0.06 µs to make where a frozen dataclass costs 0.9. Nothing they refer to refers back to them, so the
garbage collector need not look at them (`gc=False`).
"""

from __future__ import annotations

import msgspec
from msgspec import Struct

from gpu_worker.core.plan import NOTHING, StateWork, StepPlan
from gpu_worker.core.sequence import Sequence
from shared.messages import FinishReason


class ScheduledSequence(Struct, frozen=True, gc=False):
    """One sequence's share of a step; the last of its tokens may be one that a step in flight is sampling.

    Attributes:
        start: `num_computed_tokens` when the step was planned.
        samples: True when the step reaches the sequence's last token and another one is wanted.
        num_draft_tokens: Draft tokens after these that the runner may compute and verify in this step; the
            block table covers them too. Only of decodes.
        forced: The draft tokens, where the sequence's constraint forces them.
        state: Of a model with recurrent layers: what becomes of the state, other than that it goes on.
    """

    sequence: Sequence
    start: int
    num_tokens: int
    samples: bool
    num_draft_tokens: int = 0
    forced: tuple[int, ...] = ()
    state: StateWork | None = None


class ScheduledStep(Struct, frozen=True, gc=False):
    """All work of one step. `scheduled` lists decodes first.

    Attributes:
        num_tokens: Sum of the scheduled tokens, drafts not counted.
        departed: Sequences that held a place in the batch and left it since the step before: they ended or were
            preempted. One that was preempted may be scheduled again at once.
        is_throttled: Batch work was limited for the sake of interactive sequences.
        is_alone: It verifies tokens that constraints force: no step may be planned behind it.
    """

    step: int
    scheduled: list[ScheduledSequence]
    num_tokens: int
    departed: list[Sequence] = msgspec.field(default_factory=list)
    num_decodes: int = 0
    is_throttled: bool = False
    is_alone: bool = False
    num_batch: int = 0
    plan: StepPlan = NOTHING

    @property
    def is_empty(self) -> bool:
        """Whether it computes nothing; a step without sequences may encode images."""
        return not self.scheduled and not self.plan.encodes

    @property
    def num_prefilled(self) -> int:
        """Tokens of prompts: a sequence that samples computes one token for that, all others are prefill."""
        samples = [item.samples for item in self.scheduled[self.num_decodes :]]
        return self.num_tokens - self.num_decodes - sum(samples)


class LogprobEntry(Struct, frozen=True, gc=False):
    """Log probability of one token and of the most likely alternatives, as ids (text is added above the engine)."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class SampledTokens(Struct, frozen=True, gc=False):
    """What the runner made for one scheduled sequence: one token, or none when it does not sample yet.

    Attributes:
        token_ids: New tokens in order; several (accepted drafts, and the one sampled after them) only while no later
            step names the sequence.
        logprobs: One entry per new token when the request asked for them, else empty.
        prompt_logprobs: When asked, entries for positions `start + 1 … start + num_tokens` as far as the prompt goes.
        num_accepted: Of those, which are the first of `token_ids`; their KV is in the blocks.
        error: Why no token follows `token_ids`, although the sequence samples: it ends with this.
        pooled: What the step contributes to the answer of a sequence with `pooling`: float64 numbers.
    """

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[LogprobEntry, ...] = ()
    prompt_logprobs: tuple[LogprobEntry, ...] = ()
    num_drafted: int = 0
    num_accepted: int = 0
    error: str | None = None
    pooled: bytes | None = None


class StepResult(Struct, frozen=True, gc=False):
    """Outcome of a step: `sampled[i]` belongs to the sequence at place `i` of the plan.

    Attributes:
        attention: Of sequences with `NewSequence.scored_from`, by their places: how much attention their tokens from
            there on, accepted drafts included, paid to each of their blocks: probabilities, of the head with the
            largest, added up over layers and tokens. Heads and layers are the answering rank's.
    """

    step: int
    sampled: list[SampledTokens]
    attention: list[tuple[int, list[float]]] = []


class CompletedStep(Struct, frozen=True, gc=False):
    """The pending step of a runner that computes at once."""

    outcome: StepResult

    def result(self) -> StepResult:
        """Return the outcome."""
        return self.outcome


class SequenceEvent(Struct, frozen=True, gc=False):
    """What a step did to one sequence, for the consumer.

    Attributes:
        token_ids: New output tokens, the end-of-sequence token included (it counts in usage, but has no text).
        error: What went wrong, when `finish` is `failed`.
    """

    sequence: Sequence
    token_ids: tuple[int, ...]
    num_tokens_before: int
    finish: FinishReason | None = None
    logprobs: tuple[LogprobEntry, ...] = ()
    prompt_logprobs: tuple[LogprobEntry, ...] = ()
    error: str | None = None
