"""Masks of tokens that the output's grammar forbids.

They are filled when the step's forward pass has been launched: a device computes while the host works on them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from gpu_worker.core.constraint import OutputConstraint
from gpu_worker.core.sequence import Sequence
from gpu_worker.execution.batch.layout import Int64s
from gpu_worker.execution.batch.sampled_rows import SampledRows
from gpu_worker.execution.batch.transfers import Upload
from kernels.logits_bitmask import forbid_tokens
from shared.sampling import Sampling


class GrammarMask:
    """Keeps, for each row whose output follows a grammar, the constraint that says so."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        """Know nothing of any row."""
        self._num_words = -(-vocab_size // 32)
        self._device = device
        self._constraints: list[OutputConstraint | None] = [None] * num_rows

    def is_asked_by(self, sampling: Sampling) -> bool:
        """See `Feature`."""
        return sampling.grammar is not None

    def assign(self, row: int, sequence: Sequence, upload: Upload) -> None:
        """See `Feature`."""
        assert sequence.constraint is not None, "a sequence with a grammar has no constraint"
        self._constraints[row] = sequence.constraint

    def stage(self, sampled: SampledRows, places: Int64s, upload: Upload) -> StagedGrammarMask:
        """See `Feature`."""
        asking = places.tolist()
        paths = [()] * len(asking) if sampled.paths is None else [sampled.paths[place] for place in asking]
        constraints = [self._constraints[row] for row in sampled.rows[places].tolist()]
        return StagedGrammarMask(places, list(zip(constraints, paths, strict=True)), self._num_words, self._device)


@dataclass(frozen=True, slots=True)
class StagedGrammarMask:
    """The masks of a step, not filled yet.

    Attributes:
        places: Rows of logits with a mask.
        sources: The constraint of each, and the drafts that it takes for granted.
        num_words: Of 32 bits, in a mask.
        device: Where the logits are.
    """

    places: Int64s
    sources: list[tuple[OutputConstraint | None, tuple[int, ...]]]
    num_words: int
    device: torch.device

    def adjust(self, logits: torch.Tensor, slots: torch.Tensor) -> None:
        """See `StagedFeature`."""
        masks = np.empty((len(self.sources), self.num_words), dtype=np.int32)
        address, stride = masks.ctypes.data, masks.strides[0]
        for number, (constraint, drafts) in enumerate(self.sources):
            assert constraint is not None, "the row was never assigned"
            constraint.fill_mask(drafts, address + number * stride)
        upload = Upload(self.device)
        rows, staged = upload.add(self.places), upload.add(masks)
        upload.send()
        forbid_tokens(logits, rows.tensor, staged.tensor)

    def take_drawn(self, slots: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Ignore it: the scheduler tells the constraint what was drawn."""
