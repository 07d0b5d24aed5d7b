"""What a feature of sampling is: how the file of a new one has to look.

A feature keeps what it needs for each row of the batch, says for each step what of that goes to the device, and applies
it there to the logits. The sampler asks it only where a sequence asks for it, so it costs other sequences nothing.
"""

from __future__ import annotations

from typing import Protocol

import torch

from gpu_worker.core.batch_sequences import BatchSequence
from gpu_worker.execution.batch.assembled_step import SampledRows
from gpu_worker.execution.batch.transfers import Int64s, Upload
from shared.sampling import Sampling


class StagedFeature(Protocol):
    """What a feature does in one step. Its upload was sent; nothing may wait for the device."""

    def adjust(self, logits: torch.Tensor, slots: torch.Tensor) -> None:
        """Change logits in place, before a token is drawn from them.

        Shapes:
            logits: `[num_rows, vocab_size]` float32, contiguous
            slots: `[num_rows]` int64, the row in the batch of each row's sequence
        """

    def take_drawn(self, slots: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Learn which token was drawn for each row, a negative one where the logits were no distribution."""


class Feature(Protocol):
    """One thing that requests may ask of the sampler, for all rows of the batch."""

    def is_asked_by(self, sampling: Sampling) -> bool:
        """Return whether a request needs it."""

    def assign(self, row: int, sequence: BatchSequence, upload: Upload) -> None:
        """Keep what the sequence asks for, which has been given `row`; called when `is_asked_by` says so."""

    def stage(self, sampled: SampledRows, places: Int64s, upload: Upload) -> StagedFeature:
        """Prepare to sample.

        Args:
            sampled: The rows of logits.
            places: Those whose sequence asks for the feature, at least one. The same array as in the step before where
                the rows are the same and none was assigned since.
            upload: Carries what the device needs.
        """
