"""How many drafts each decode may verify in a step, and what became of them.

A draft predicts a sequence's next tokens. The step computes it behind the known tokens, and what is sampled before each
draft token says whether that is accepted, so drafts change how many tokens a step makes and never which.
A policy chooses depths; the planner shrinks them to the tokens and blocks that nobody else wants.
"""

from __future__ import annotations

from typing import Protocol

from gpu_worker.core.sequence import Sequence


class DraftPolicy(Protocol):
    """Chooses depths, and learns from what they brought."""

    @property
    def is_backing_off(self) -> bool:
        """Say whether the next step drafts nothing for certain, nor did the last one: it may be planned behind that."""
        ...

    def may_draft(self, num_sequences: int, *, is_changing: bool) -> bool:
        """Say whether `depths` is to be asked in this step; called once a step.

        Args:
            num_sequences: That it decodes; none is no reason to ask.
            is_changing: It computes prompts too, or a sequence has left since the last step: its time tells nothing.
        """
        ...

    def depths(self, sequences: list[Sequence], limits: list[int]) -> list[int]:
        """Return how many drafts each decoding sequence should verify in the next step, at most its limit."""
        ...

    def learn(self, sequence: Sequence, num_drafted: int, accepted: tuple[int, ...]) -> None:
        """Record how many draft tokens the sequence's last step verified, and the numbers of those accepted."""
        ...

    def time(self, num_sequences: int, num_drafted: int, duration_s: float) -> None:
        """Record how long a step took that computed one token of each sequence and these drafts, nothing else."""
        ...


class Speculation:
    """A policy, and the counts of what it led to.

    Attributes:
        num_drafts: Times that a sequence verified at least one draft token in a step.
        num_draft_tokens: Draft tokens verified.
        num_accepted_tokens: Those of them that became tokens of their sequence.
    """

    def __init__(self, policy: DraftPolicy) -> None:
        """Count from nothing."""
        self.policy = policy
        self.num_drafts = 0
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0

    @property
    def may_draft(self) -> bool:
        """Say whether the next step may draft, or the last one did: one cannot be planned behind the other."""
        return not self.policy.is_backing_off

    def record(self, sequence: Sequence, num_drafted: int, accepted: tuple[int, ...]) -> None:
        """Count what a step verified for a sequence."""
        if num_drafted == 0:
            return
        num_accepted = len(accepted)
        self.num_drafts += 1
        self.num_draft_tokens += num_drafted
        self.num_accepted_tokens += num_accepted
        sequence.num_drafted_tokens += num_drafted
        sequence.num_accepted_tokens += num_accepted
        self.policy.learn(sequence, num_drafted, accepted)
