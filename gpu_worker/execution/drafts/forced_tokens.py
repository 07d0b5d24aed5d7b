"""Drafts that are right for certain: the tokens that the constraints of sequences force."""

from __future__ import annotations

from collections.abc import Sequence as Values

from gpu_worker.core.draft import NO_DRAFT, Draft
from gpu_worker.core.step import ScheduledSequence


def forced_drafts(scheduled: Values[ScheduledSequence]) -> list[Draft]:
    """Return the forced tokens of each sequence for which that was planned, none of the others."""
    return [_forced_draft(item) if item.is_forced else NO_DRAFT for item in scheduled]


def _forced_draft(item: ScheduledSequence) -> Draft:
    assert item.sequence.constraint is not None, "nothing forces the sequence's tokens"
    return Draft(tuple(item.sequence.constraint.forced_tokens()[: item.num_draft_tokens]))
