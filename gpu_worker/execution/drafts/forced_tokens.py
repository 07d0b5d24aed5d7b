"""Drafts that are right for certain: the tokens that the constraints of sequences force."""

from __future__ import annotations

from collections.abc import Sequence as Values

from gpu_worker.core.draft import MAX_DRAFT_TOKENS, NO_DRAFT, Draft
from gpu_worker.core.step import ScheduledSequence
from gpu_worker.execution.memory.state_pool import StatePool


def forced_drafts(scheduled: Values[ScheduledSequence], states: StatePool | None) -> list[Draft] | None:
    """Return the forced tokens of each sequence for which that was planned, none of the others.

    Args:
        scheduled: The items of a step.
        states: Of recurrent layers, which keep what they computed of a limited number of drafts. What is forced
            beyond them waits for the next step.

    Returns:
        None where there are no drafts at all.
    """
    most = MAX_DRAFT_TOKENS if states is None else states.max_draft_tokens
    drafts = [_forced_draft(item, most) if item.is_forced else NO_DRAFT for item in scheduled]
    return drafts if any(drafts) else None


def _forced_draft(item: ScheduledSequence, most: int) -> Draft:
    assert item.sequence.constraint is not None, "nothing forces the sequence's tokens"
    return Draft(tuple(item.sequence.constraint.forced_tokens()[: min(item.num_draft_tokens, most)]))
