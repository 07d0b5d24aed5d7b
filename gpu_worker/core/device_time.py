"""Shares the time of each step among its sequences.

A sequence pays for its tokens what the scheduler's model of step times expects of them (`StepTimeModel`): an equal part
of what a step takes whatever is in it, the cost of a sequence of its lane, and that of each token beyond its first,
drafts included. The parts are scaled to the time that the step took, so they add up to it. What a step computes for
sequences that have ended meanwhile is paid by the others; without others, by those of the next step. So all shares
together are the time of all steps.
"""

from __future__ import annotations

from collections.abc import Sequence as Values

from gpu_worker.core.sequence import SequenceStatus
from gpu_worker.core.step import SampledTokens, ScheduledSequence, ScheduledStep, StepResult
from gpu_worker.core.step_time import StepTimeModel


class DeviceTime:
    """Writes the records of sequences. Used by the scheduler as steps land."""

    def __init__(self, model: StepTimeModel) -> None:
        self._model = model
        self._payers: list[bool] | None = None
        self._unpaid_s = 0.0

    def find_payers(self, step: ScheduledStep) -> None:
        """Note who pays for a step, before its outcome is applied, which ends sequences."""
        finished = SequenceStatus.FINISHED
        payers = [
            item.sequence.status is not finished and not item.sequence.record.is_closed for item in step.scheduled
        ]
        self._payers = None if all(payers) else payers

    def share(self, step: ScheduledStep, result: StepResult, duration_s: float, landed_at: float) -> None:
        """Share out the step of which the payers were found last."""
        items, payers = step.scheduled, self._payers
        if payers is not None and not any(payers):
            self._unpaid_s += duration_s
            return
        began_at = landed_at - duration_s
        duration_s += self._unpaid_s
        self._unpaid_s = 0.0
        num_items, num_decodes = len(items), step.num_decodes
        has_one_lane = step.num_batch in (0, num_items)
        if payers is None and num_decodes == num_items and has_one_lane and not step.plan.num_drafts:
            # The usual step: nothing but decodes, which cost the same.
            part = duration_s / num_items
            for item in items:
                item.sequence.record.device_s += part
            return
        num_payers = num_items if payers is None else sum(payers)
        shares = self._shares(items, result.sampled, payers, num_payers, duration_s)
        for place, (item, sampled, share_s) in enumerate(zip(items, result.sampled, shares, strict=True)):
            if share_s is None:
                continue
            record = item.sequence.record
            record.device_s += share_s
            if place >= num_decodes:
                record.prefill(item.start, item.num_tokens, share_s, began_at, landed_at)
            elif sampled.num_drafted:
                record.rejected_s += self._rejected(item, sampled, share_s, num_payers)

    def _shares(
        self,
        items: Values[ScheduledSequence],
        sampled: Values[SampledTokens],
        payers: Values[bool] | None,
        num_payers: int,
        duration_s: float,
    ) -> list[float | None]:
        """Return the share of each item in seconds; None for one that does not pay."""
        weights = [
            self._weight(item, outcome.num_drafted, num_payers) if payers is None or payers[place] else None
            for place, (item, outcome) in enumerate(zip(items, sampled, strict=True))
        ]
        total = sum([weight for weight in weights if weight is not None])
        return [None if weight is None else duration_s * weight / total for weight in weights]

    def _weight(self, item: ScheduledSequence, num_drafted: int, num_payers: int) -> float:
        fixed, interactive, batch, token = self._model.costs_s
        own = interactive if item.sequence.lane == "interactive" else batch
        return fixed / num_payers + own + token * (item.num_tokens - 1 + num_drafted)

    def _rejected(self, item: ScheduledSequence, sampled: SampledTokens, share_s: float, num_payers: int) -> float:
        num_rejected = sampled.num_drafted - sampled.num_accepted
        return share_s * self._model.token_s * num_rejected / self._weight(item, sampled.num_drafted, num_payers)
