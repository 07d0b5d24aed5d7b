"""A step as the host knows it before it is launched. Values only; no device."""

from __future__ import annotations

from collections.abc import Sequence as Values

import numpy as np

from gpu_worker.core.batch_sequences import BatchSequence, Share
from gpu_worker.core.draft import Draft
from gpu_worker.core.plan import StepPlan
from gpu_worker.execution.batch.layout import Int64s, StepLayout
from gpu_worker.execution.batch.sampled_rows import SampledRows, rows_behind_drafts


class AssembledStep:
    """A plan, and where its tokens are.

    Attributes:
        layout: Of its tokens, drafts included.
        drafts: Of each sequence; None when there are none at all.
        samples: For each sequence, whether it samples.
        shares: Of each sequence; of a step that only decodes, made only where they are wanted.
        departed: Sequences that have left the batch since the step was submitted.
    """

    __slots__ = ("_do_all_sample", "_prompt_lens", "departed", "drafts", "layout", "samples", "shares")

    def __init__(
        self,
        plan: StepPlan,
        shares: Values[Share],
        layout: StepLayout,
        prompt_lens: Int64s,
        drafts: list[Draft] | None = None,
    ) -> None:
        """Describe the step; `prompt_lens` are the prompt tokens of each sequence."""
        self.layout = layout
        self.shares = shares
        self.drafts = drafts
        self.samples = [True] * plan.num_decodes + plan.samples
        self._do_all_sample = all(plan.samples)
        self.departed: set[BatchSequence] = set()
        self._prompt_lens = prompt_lens

    @property
    def is_decode(self) -> bool:
        """Say whether each sequence computes its last token and drafts, and samples behind all of these."""
        num_drafts = 0 if self.drafts is None else sum(map(len, self.drafts))
        return self._do_all_sample and len(self.layout.token_ids) == len(self.samples) + num_drafts

    @property
    def sampling_drafts(self) -> list[Draft] | None:
        """Return the drafts of the sequences that sample; None when there are none at all."""
        if self.drafts is None:
            return None
        return [draft for draft, samples in zip(self.drafts, self.samples, strict=True) if samples]

    def sampled_rows(self) -> SampledRows:
        """Return the rows behind the last tokens of the sequences that sample, and behind each of their drafts."""
        layout, drafts = self.layout, self.sampling_drafts
        # The token that follows the last known one has as many before it in the output as are known.
        last_tokens, rows, positions = layout.last_tokens, layout.rows, layout.context_lens - self._prompt_lens
        if not self._do_all_sample:
            last_tokens, rows, positions = (array[self.samples] for array in (last_tokens, rows, positions))
        if drafts is None:
            return SampledRows(last_tokens, rows, positions)
        return rows_behind_drafts(last_tokens, rows, positions - np.array([len(draft) for draft in drafts]), drafts)
