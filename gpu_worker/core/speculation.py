"""How many drafts each decode may verify in a step, and how many were accepted.

A draft predicts a sequence's next tokens. The step computes it after the known tokens, and the token sampled before
each draft token decides whether that is accepted, so drafts change how many tokens a step makes and never which.
A policy chooses depths; `DraftPlanner` shrinks them to the tokens and blocks that are left. Drafts take their
blocks for one step: they delay and preempt no sequence. Tokens that a sequence's constraint forces are verified as
drafts that are right for certain, some at once.
"""

from __future__ import annotations

from typing import Protocol

from gpu_worker.core.sequence import Sequence
from gpu_worker.core.sequence_blocks import SequenceBlocks
from gpu_worker.core.step import ScheduledSequence

MAX_FORCED_TOKENS = 16
"""Of a sequence in a step: others wait for as long as these take."""


class DraftPolicy(Protocol):
    """Chooses depths, and learns from what they brought."""

    @property
    def is_backing_off(self) -> bool:
        """Return whether neither the last nor the next step drafts, so that steps may overlap."""

    def may_draft(self, num_sequences: int, *, is_changing: bool) -> bool:
        """Return whether `depths` is to be asked in this step; called once a step.

        Args:
            num_sequences: That it decodes; none is not a reason to ask.
            is_changing: It computes prompts too, or a sequence has left since the last step: its time tells nothing.
        """

    def depths(self, sequences: list[Sequence], limits: list[int]) -> list[int]:
        """Return how many drafts each decoding sequence should verify in the next step, at most its limit."""

    def learn(self, sequence: Sequence, num_drafted: int, num_accepted: int) -> None:
        """Record how many draft tokens the sequence's last step verified, and how many it accepted."""

    def time(self, num_sequences: int, num_drafted: int, duration_s: float) -> None:
        """Record how long a step took that computed one token of each sequence and these drafts, nothing else."""


class Speculation:
    """A policy, and the counts of what it led to.

    Attributes:
        num_drafts: Times that a sequence verified at least one draft token in a step.
        num_draft_tokens: Draft tokens verified.
        num_accepted_tokens: Those of them that became tokens of their sequence.
    """

    def __init__(self, policy: DraftPolicy) -> None:
        self.policy = policy
        self.num_drafts = 0
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0

    @property
    def may_draft(self) -> bool:
        """Return whether the next step may draft, or the last one did: one cannot be planned behind the other."""
        return not self.policy.is_backing_off

    def record(self, sequence: Sequence, num_drafted: int, num_accepted: int) -> None:
        """Count what a step verified for a sequence."""
        if num_drafted == 0:
            return
        self.num_drafts += 1
        self.num_draft_tokens += num_drafted
        self.num_accepted_tokens += num_accepted
        sequence.num_drafted_tokens += num_drafted
        sequence.num_accepted_tokens += num_accepted
        self.policy.learn(sequence, num_drafted, num_accepted)


class DraftPlanner:
    """Puts drafts into the decodes of a step, which are its first items."""

    def __init__(self, blocks: SequenceBlocks) -> None:
        self._blocks = blocks

    def add_forced(
        self, scheduled: list[ScheduledSequence], num_decodes: int, num_left: int, *, is_throttled: bool
    ) -> int:
        """Let decodes verify what their constraints force; return how many of `num_left` tokens that takes."""
        left = num_left
        for place, item in enumerate(scheduled[:num_decodes]):
            constraint = item.sequence.constraint
            if constraint is None or not (forced := constraint.forced_tokens()):
                continue
            count = min(len(forced), MAX_FORCED_TOKENS, left, *_draft_limits([item], is_throttled=is_throttled))
            if count > 0:
                count = self._covered(item, count)
            if count > 0:
                scheduled[place] = _with_drafts(item, count, tuple(forced[:count]))
                left -= count
        return num_left - left

    def add_drafts(
        self,
        policy: DraftPolicy,
        scheduled: list[ScheduledSequence],
        num_decodes: int,
        num_left: int,
        *,
        is_throttled: bool,
    ) -> None:
        """Let decodes verify drafts with the `num_left` tokens that are left of the budget."""
        decodes = scheduled[:num_decodes]
        limits = _draft_limits(decodes, is_throttled=is_throttled)
        depths = policy.depths([item.sequence for item in decodes], limits)
        for place, (item, limit, depth) in enumerate(zip(decodes, limits, depths, strict=True)):
            depth = min(depth, limit, num_left)
            if depth > 0 and not item.forced:
                depth = self._covered(item, depth)
                num_left -= depth
                scheduled[place] = _with_drafts(item, depth)

    def _covered(self, item: ScheduledSequence, num_drafts: int) -> int:
        """Let the tables cover drafts behind a decode, as far as blocks are free; return how many they cover."""
        end = item.start + 1
        return self._blocks.cover(item.sequence, end + num_drafts) - end


def _with_drafts(item: ScheduledSequence, count: int, forced: tuple[int, ...] = ()) -> ScheduledSequence:
    sequence: Sequence = item.sequence
    sequence.next_publish = 0
    return ScheduledSequence(sequence, item.start, 1, True, count, forced)


def _draft_limits(decodes: list[ScheduledSequence], *, is_throttled: bool) -> list[int]:
    """Return how many drafts each decode may verify: none of batch sequences while these are throttled."""
    # The last token that a sequence may have is sampled, never drafted.
    return [
        0 if is_throttled and item.sequence.lane == "batch" else item.sequence.max_num_tokens - item.start - 2
        for item in decodes
    ]
