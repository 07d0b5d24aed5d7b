"""Which decodes of a step verify drafts, and how many: with tokens and blocks that nobody else wants.

Drafts take their blocks for one step: they delay and preempt nobody. Tokens that a sequence's constraint forces are
verified as drafts that are right for certain, some at once.
"""

from __future__ import annotations

from gpu_worker.core.sequence import Sequence
from gpu_worker.core.sequence_blocks import SequenceBlocks
from gpu_worker.core.speculation import DraftPolicy
from gpu_worker.core.step import ScheduledSequence

MAX_FORCED_TOKENS = 16
"""Of a sequence in a step: others wait for as long as these take."""


class DraftPlanner:
    """Puts drafts into the decodes of a step, which are its first items."""

    def __init__(self, blocks: SequenceBlocks) -> None:
        """Take blocks from these."""
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
        """Let decodes verify drafts with the `num_left` tokens that nobody else wants."""
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
