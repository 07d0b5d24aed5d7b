"""`min_tokens`: the tokens that would end a sequence are forbidden until its output is so long.

Where nothing else is allowed (a grammar is complete, say), they stay allowed: the output ends early instead of failing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from gpu_worker.core.batch_sequences import BatchSequence
from gpu_worker.execution.batch.assembled_step import SampledRows
from gpu_worker.execution.batch.transfers import Int64s, StagedArray, Upload
from gpu_worker.layers.divided_vocabulary import Vocabulary
from shared.sampling import Sampling


class MinTokens:
    """Keeps, for each row that asks, the tokens that end its sequence, and how long that is forbidden."""

    def __init__(self, num_rows: int, vocab_size: int, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._vocab_size = vocab_size
        self._num_tokens = np.zeros(num_rows, dtype=np.int64)
        self._end_ids: dict[int, Int64s] = {}

    def is_asked_by(self, sampling: Sampling) -> bool:
        """See `Feature`."""
        return sampling.min_tokens > 0

    def assign(self, row: int, sequence: BatchSequence, upload: Upload) -> None:
        """See `Feature`."""
        end_ids = [token_id for token_id in sequence.stop_ids if token_id < self._vocab_size]
        self._end_ids[row] = np.array(sorted(end_ids), dtype=np.int64)
        self._num_tokens[row] = sequence.sampling.min_tokens if end_ids else 0

    def stage(self, sampled: SampledRows, places: Int64s, upload: Upload) -> StagedMinTokens:
        """See `Feature`. Behind drafts, the place in the output decides too."""
        places = places[sampled.positions[places] < self._num_tokens[sampled.rows[places]]]
        if not len(places):
            return StagedMinTokens(None, self._vocabulary)
        end_ids = [self._end_ids[row] for row in sampled.rows[places].tolist()]
        counts = [len(ids) for ids in end_ids]
        indices = np.concatenate(end_ids) + np.repeat(places * self._vocab_size, counts)
        owners = np.repeat(np.arange(len(places), dtype=np.int64), counts)
        ends = ForbiddenEnds(upload.add(places), upload.add(indices), upload.add(owners))
        return StagedMinTokens(ends, self._vocabulary)


@dataclass(frozen=True, slots=True)
class ForbiddenEnds:
    """The ends that are forbidden in a step.

    Attributes:
        indices: Tokens that end their sequences: places in the logits, laid end to end.
        owners: The entry of `places` that each index belongs to.
    """

    places: StagedArray
    indices: StagedArray
    owners: StagedArray


@dataclass(frozen=True, slots=True)
class StagedMinTokens:
    """What is forbidden in a step, by rows of the logits; None where every output is long enough."""

    ends: ForbiddenEnds | None
    vocabulary: Vocabulary

    def adjust(self, logits: torch.Tensor, slots: torch.Tensor) -> None:
        """See `StagedFeature`."""
        if self.ends is None:
            return
        flat, indices = logits.view(-1), self.ends.indices.tensor
        before = flat.index_select(0, indices)
        flat.index_fill_(0, indices, -math.inf)
        has_nothing_else = self.vocabulary.highest(logits.index_select(0, self.ends.places.tensor)) == -math.inf
        is_kept = has_nothing_else.index_select(0, self.ends.owners.tensor)
        flat.index_copy_(0, indices, before.masked_fill(~is_kept, -math.inf))

    def take_drawn(self, slots: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Ignore it."""
