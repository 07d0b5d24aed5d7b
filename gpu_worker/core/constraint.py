"""What the output of a sequence must look like, as far as scheduler and sampler have to know."""

from __future__ import annotations

from typing import Protocol

from gpu_worker.core.plan import NewSequence


class OutputConstraint(Protocol):
    """Says which tokens may come next. Its state follows from the output's tokens, so it can be made anew anywhere.

    The scheduler tells it the tokens, each once; the sampler asks it for masks, behind drafts too. All on one thread.
    """

    @property
    def error(self) -> str | None:
        """Return why it cannot go on, which ends its sequence; None while it can."""

    @property
    def is_at_fault(self) -> bool:
        """Return whether the `error` is that of what the client asked for, rather than of this worker."""

    @property
    def is_complete(self) -> bool:
        """Return whether nothing more may follow the output."""

    def advance(self, token_id: int) -> bool:
        """Advance by the output's next token; return False if it is not allowed there, or if there is an `error`."""

    def advance_inside(self, token_id: int) -> bool:
        """Advance by the output's next token if more has to follow it; otherwise return False and stay."""

    def fill_mask(self, drafts: tuple[int, ...], address: int) -> None:
        """Write which tokens may follow the output and then `drafts`.

        It is never nothing: with an `error`, and behind drafts that may not stand there, all tokens may follow.

        Args:
            drafts: May be none.
            address: Of the first of `ceil(vocab_size / 32)` words; bit `t % 32` of word `t // 32` allows token `t`.
        """

    def allows(self, drafts: tuple[int, ...]) -> bool:
        """Return whether these tokens may follow the output."""

    def forced_tokens(self) -> list[int]:
        """Return the tokens that follow the output, as far as there is no choice."""

    def some_allowed(self, number: int) -> int:
        """Return one of the tokens that may follow the output, the same for the same number."""


class ConstraintSource(Protocol):
    """Supplies constraints to the process that computes plans: a plan has the grammar, not its compiled form."""

    def open(self, new: NewSequence) -> OutputConstraint:
        """Return the constraint of a sequence with a grammar, behind the output that it has."""

    def follow(self, constraint: OutputConstraint, token_ids: list[int]) -> None:
        """Bring a constraint behind further tokens of the output."""


class SharedConstraints:
    """The constraints of a scheduler's sequences, for a runner in the same process and thread.

    One constraint serves both: it costs memory and time, and the scheduler has advanced it when a plan says so.
    """

    def __init__(self) -> None:
        self._by_id: dict[str, OutputConstraint] = {}

    def add(self, sequence_id: str, constraint: OutputConstraint) -> None:
        """Offer the constraint of a sequence that the scheduler has taken in."""
        self._by_id[sequence_id] = constraint

    def remove(self, sequence_id: str) -> None:
        """Drop that of a sequence that has ended, if there is one."""
        self._by_id.pop(sequence_id, None)

    def open(self, new: NewSequence) -> OutputConstraint:
        """See `ConstraintSource`."""
        return self._by_id[new.id]

    def follow(self, constraint: OutputConstraint, token_ids: list[int]) -> None:
        """Do nothing: the scheduler has told it."""
