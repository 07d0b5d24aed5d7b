"""`logit_bias`: what is added to the logits of some tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from gpu_worker.core.batch_sequences import BatchSequence
from gpu_worker.execution.batch.assembled_step import SampledRows
from gpu_worker.execution.batch.transfers import Int64s, StagedArray, Upload
from shared.sampling import Sampling

Float32s = npt.NDArray[np.float32]


class Bias:
    """Keeps, for each row that has a bias, tokens and what is added to them."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._biases: dict[int, tuple[Int64s, Float32s]] = {}
        # What the last step was given, which the next one takes again while its rows are the same.
        self._batch: tuple[bytes, bytes] | None = None
        self._indices: Int64s = np.zeros(0, dtype=np.int64)
        self._values: Float32s = np.zeros(0, dtype=np.float32)

    def is_asked_by(self, sampling: Sampling) -> bool:
        """See `Feature`."""
        return bool(sampling.logit_bias)

    def assign(self, row: int, sequence: BatchSequence, upload: Upload) -> None:
        """See `Feature`. Ids outside the vocabulary name no token and are left out."""
        bias = sequence.sampling.logit_bias
        entries = [(token_id, value) for token_id, value in bias.items() if 0 <= token_id < self._vocab_size]
        token_ids, values = zip(*entries, strict=True) if entries else ((), ())
        self._batch = None
        self._biases[row] = np.array(token_ids, dtype=np.int64), np.array(values, dtype=np.float32)

    def stage(self, sampled: SampledRows, places: Int64s, upload: Upload) -> StagedBias:
        """See `Feature`."""
        rows = sampled.rows[places]
        batch = (places.tobytes(), rows.tobytes())
        if batch != self._batch:
            biases = [(place, *self._biases[row]) for place, row in zip(places, rows.tolist(), strict=True)]
            self._batch = batch
            self._indices = np.concatenate([token_ids + place * self._vocab_size for place, token_ids, _ in biases])
            self._values = np.concatenate([values for _, _, values in biases])
        return StagedBias(upload.add(self._indices), upload.add(self._values))


@dataclass(frozen=True, slots=True)
class StagedBias:
    """The biases of a step: indices into the flattened logits, and the value to add at each."""

    indices: StagedArray
    values: StagedArray

    def adjust(self, logits: torch.Tensor, slots: torch.Tensor) -> None:
        """See `StagedFeature`."""
        logits.view(-1).index_add_(0, self.indices.tensor, self.values.tensor)

    def take_drawn(self, slots: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Ignore it."""
