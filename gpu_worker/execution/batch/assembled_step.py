"""A step as the host knows it before it is launched. Values only; no device."""

from __future__ import annotations

from collections.abc import Sequence as Values

import numpy as np

from gpu_worker.core.draft import Draft
from gpu_worker.core.step import ScheduledSequence
from gpu_worker.execution.batch.layout import StepLayout
from gpu_worker.execution.batch.sampled_rows import SampledRows, rows_behind_drafts


class AssembledStep:
    """A plan, and where its tokens are.

    Attributes:
        scheduled: The plan's sequences.
        layout: Of their tokens, drafts included.
        drafts: Of each sequence; None when there are none at all.
        samples: For each sequence, whether it samples.
    """

    __slots__ = ("drafts", "layout", "samples", "scheduled")

    def __init__(
        self, scheduled: Values[ScheduledSequence], layout: StepLayout, drafts: list[Draft] | None = None
    ) -> None:
        """Describe the step."""
        self.scheduled = scheduled
        self.layout = layout
        self.drafts = drafts
        self.samples = [item.samples for item in scheduled]

    @property
    def is_decode(self) -> bool:
        """Say whether each sequence computes its last token and drafts, and samples behind all of these."""
        num_drafts = 0 if self.drafts is None else sum(map(len, self.drafts))
        return all(self.samples) and len(self.layout.token_ids) == len(self.samples) + num_drafts

    @property
    def sampling_drafts(self) -> list[Draft] | None:
        """Return the drafts of the sequences that sample; None when there are none at all."""
        if self.drafts is None:
            return None
        return [draft for draft, samples in zip(self.drafts, self.samples, strict=True) if samples]

    def sampled_rows(self) -> SampledRows:
        """Return the rows behind the last tokens of the sequences that sample, and behind each of their drafts."""
        layout, drafts = self.layout, self.sampling_drafts
        last_tokens, rows = layout.last_tokens[self.samples], layout.rows[self.samples]
        positions = np.array(
            [item.start + item.num_tokens - item.sequence.num_prompt_tokens for item in self.scheduled if item.samples],
            dtype=np.int64,
        )
        if drafts is None:
            return SampledRows(last_tokens, rows, positions)
        return rows_behind_drafts(last_tokens, rows, positions, drafts)
