"""`bad_words`: the last token of a forbidden run of tokens is forbidden where the output ends with the others.

A run of several tokens looks at the output so far, so its sequence has to wait for its last token (`needs_last_token`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from gpu_worker.core.batch_sequences import BatchSequence
from gpu_worker.execution.batch.assembled_step import SampledRows
from gpu_worker.execution.batch.transfers import Int64s, StagedArray, Upload
from shared.sampling import Sampling


class BadWords:
    """Keeps the sequence of each row that forbids words."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._sequences: dict[int, BatchSequence] = {}

    def is_asked_by(self, sampling: Sampling) -> bool:
        """See `Feature`."""
        return bool(sampling.bad_words)

    def assign(self, row: int, sequence: BatchSequence, upload: Upload) -> None:
        """See `Feature`."""
        self._sequences[row] = sequence

    def stage(self, sampled: SampledRows, places: Int64s, upload: Upload) -> StagedBadWords:
        """See `Feature`."""
        rows = sampled.rows[places].tolist()
        indices = [
            place * self._vocab_size + token_id
            for place, row in zip(places.tolist(), rows, strict=True)
            for token_id in self._forbidden(row, () if sampled.paths is None else sampled.paths[place])
        ]
        return StagedBadWords(upload.add(np.array(indices, dtype=np.int64)) if indices else None)

    def _forbidden(self, row: int, path: tuple[int, ...]) -> Iterator[int]:
        """Yield the tokens that may not follow the output of a row's sequence and these drafts."""
        sequence = self._sequences[row]
        longest = max(map(len, sequence.bad_words), default=1) - 1
        first = max(sequence.num_prompt_tokens, len(sequence.token_ids) - longest)
        tail = (*sequence.token_ids[first:], *path)
        for word in sequence.bad_words:
            num_before = len(word) - 1
            if num_before <= len(tail) and tail[len(tail) - num_before :] == word[:-1]:
                yield word[-1]


@dataclass(frozen=True, slots=True)
class StagedBadWords:
    """What is forbidden in a step: places in the logits, laid end to end; None for nothing."""

    indices: StagedArray | None

    def adjust(self, logits: torch.Tensor, slots: torch.Tensor) -> None:
        """See `StagedFeature`."""
        if self.indices is not None:
            logits.view(-1).index_fill_(0, self.indices.tensor, -math.inf)

    def take_drawn(self, slots: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Ignore it."""
