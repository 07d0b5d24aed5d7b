"""The protocol of model runners, which compute the engine's steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from gpu_worker.core.plan import StepPlan
from gpu_worker.core.step import StepResult
from shared.errors import HeadraceError


class BrokenRunnerError(HeadraceError):
    """The runner can compute nothing any more.

    Attributes:
        is_logged: Whether the code that raises this has logged the cause.
    """

    def __init__(self, cause: Exception, *, is_logged: bool = False) -> None:
        super().__init__(
            f"the model runner fails whatever it computes; the last time by {type(cause).__name__}: {cause}"
        )
        self.cause = cause
        self.is_logged = is_logged


class InterruptedRunnerError(BrokenRunnerError):
    """The runner has lost all steps and whatever it kept of sequences; it can compute again after `recover`.

    Attributes:
        recover: Takes as long as it takes; raises `BrokenRunnerError` if it does not succeed. Then sequences are new.
    """

    def __init__(self, cause: Exception, recover: Callable[[], None]) -> None:
        super().__init__(cause, is_logged=True)
        self.recover = recover


class InvalidLogitsError(HeadraceError):
    """The model's logits for a token are not a distribution."""

    def __init__(self) -> None:
        super().__init__("the model's logits are not numbers, or leave no token to choose from")


class PendingStep(Protocol):
    """A submitted step."""

    def result(self) -> StepResult:
        """Wait until the step's tokens are on the host; raise what the step raised.

        A sequence whose logits are not a distribution has a result with an error, which concerns no other sequence.
        """


class ModelRunner(Protocol):
    """Executes plans, in the order in which they are submitted.

    It knows sequences from plans alone. It drops what it keeps for `plan.departed` before anything that can fail; a row
    may be named there that it never saw. A step that was submitted, and failed or not, may be computed again when its
    sequences have departed.
    """

    @property
    def max_steps_in_flight(self) -> int:
        """Steps that may be submitted before the first of them has a result; 1 when `submit` computes at once."""

    def submit(self, plan: StepPlan) -> PendingStep:
        """Start to compute the plan's tokens and to sample; the plan schedules or encodes something.

        A token to compute that no plan has told yet is the one sampled last for the sequence, by a step that is still
        in flight. The token that a sequence samples is number `start + length - num_prompt_tokens` of the output.
        """


@dataclass(frozen=True, slots=True)
class RefusedStep:
    """A step whose submission failed. It fails when it lands, after those before it."""

    error: Exception

    def result(self) -> StepResult:
        """Raise what the submission raised."""
        raise self.error
