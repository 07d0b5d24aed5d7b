"""`allowed_token_ids`: all other tokens are forbidden, by one bit a token."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from gpu_worker.core.batch_sequences import BatchSequence
from gpu_worker.execution.batch.assembled_step import SampledRows
from gpu_worker.execution.batch.rows import RowTable
from gpu_worker.execution.batch.transfers import Int64s, StagedArray, Upload
from kernels.logits_bitmask import forbid_tokens
from shared.sampling import Sampling


class AllowedTokens:
    """Owns the bits of all rows."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        """Allocate them: an eighth of a byte for each row and token."""
        self._vocab_size = vocab_size
        self._num_words = -(-vocab_size // 32)
        self._bits = RowTable(num_rows, np.int32, device, (self._num_words,))

    def is_asked_by(self, sampling: Sampling) -> bool:
        """See `Feature`."""
        return sampling.allowed_token_ids is not None

    def assign(self, row: int, sequence: BatchSequence, upload: Upload) -> None:
        """See `Feature`. Ids outside the vocabulary name no token and are left out."""
        allowed = np.array(sequence.sampling.allowed_token_ids, dtype=np.int64)
        is_allowed = np.zeros(self._num_words * 32, dtype=np.uint8)
        is_allowed[allowed[allowed < self._vocab_size]] = 1
        self._bits.write([row], np.packbits(is_allowed, bitorder="little").view(np.int32)[None], upload)

    def stage(self, sampled: SampledRows, places: Int64s, upload: Upload) -> StagedAllowedTokens:
        """See `Feature`."""
        return StagedAllowedTokens(self._bits.values, upload.add(places), upload.add(sampled.rows[places]))


@dataclass(frozen=True, slots=True)
class StagedAllowedTokens:
    """What is allowed in a step.

    Attributes:
        bits: Of all rows of the batch.
        places: Rows of the logits.
        rows: The row in the batch of each of `places`.
    """

    bits: torch.Tensor
    places: StagedArray
    rows: StagedArray

    def adjust(self, logits: torch.Tensor, slots: torch.Tensor) -> None:
        """See `StagedFeature`."""
        forbid_tokens(logits, self.places.tensor, self.bits.index_select(0, self.rows.tensor))

    def take_drawn(self, slots: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Ignore it."""
