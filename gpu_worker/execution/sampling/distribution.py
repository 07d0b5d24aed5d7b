"""The distribution that a token is drawn from: temperature, `min_p`, `top_k`, `top_p`, and the seed of the draw.

`kernels.sampling` says what they mean. Every row of the batch has one, greedy ones included.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Values

import numpy as np
import torch
from msgspec import Struct

from gpu_worker.core.batch_sequences import BatchSequence
from gpu_worker.execution.batch.assembled_step import SampledRows
from gpu_worker.execution.batch.rows import RowTable
from gpu_worker.execution.batch.transfers import StagedArray, Upload
from gpu_worker.layers.divided_vocabulary import Vocabulary
from kernels.sampling import SamplingParameters
from shared.sampling import LEAST_TEMPERATURE, Sampling


class Distributions:
    """Owns the parameters of all rows."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._inverse_temperature = RowTable(num_rows, np.float32, device, fill=1.0)
        self._log_min_p = RowTable(num_rows, np.float32, device, fill=-math.inf)
        self._top_k = RowTable(num_rows, np.int32, device)
        self._top_p = RowTable(num_rows, np.float32, device, fill=1.0)
        self._seed = RowTable(num_rows, np.int64, device)
        tables = (self._inverse_temperature, self._log_min_p, self._top_k, self._top_p, self._seed)
        self._parameters = SamplingParameters(*(table.values for table in tables))

    def is_truncated_by(self, sampling: Sampling) -> bool:
        """Return whether a request's tokens are drawn from a part of their distribution."""
        return not _is_greedy(sampling) and (sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0)

    def assign(self, rows: Values[int], newcomers: Values[BatchSequence], upload: Upload) -> None:
        """Write the parameters of sequences that were given rows."""
        samplings = [sequence.sampling for sequence in newcomers]
        self._inverse_temperature.write(rows, [_inverse_temperature(sampling) for sampling in samplings], upload)
        self._log_min_p.write(rows, [_log_min_p(sampling) for sampling in samplings], upload)
        self._top_k.write(rows, [min(sampling.top_k, self._vocab_size) for sampling in samplings], upload)
        self._top_p.write(rows, [sampling.top_p for sampling in samplings], upload)
        self._seed.write(rows, [sampling.seed for sampling in samplings], upload)

    def stage(
        self, sampled: SampledRows, upload: Upload, *, may_truncate: bool, marks: StagedArray | None = None
    ) -> StagedDraw:
        """Prepare to draw a token for each row of logits; `may_truncate` where `is_truncated_by` says so of any."""
        return StagedDraw(self._parameters, upload.add(sampled.positions), may_truncate, marks)


class StagedDraw(Struct, frozen=True, gc=False):
    """The draws of a step.

    Attributes:
        positions: Place in its output of what each row of logits draws.
        may_truncate: Whether any row draws from a part of its distribution.
        marks: Of each row of logits, see `kernels.sampling`; None where none is watermarked.
    """

    parameters: SamplingParameters
    positions: StagedArray
    may_truncate: bool
    marks: StagedArray | None = None

    def draw(self, logits: torch.Tensor, slots: torch.Tensor, vocabulary: Vocabulary) -> torch.Tensor:
        """Draw one token a row, `INVALID_TOKEN` where the logits are not a distribution.

        Shapes:
            logits: `[num_rows, vocab_size]` float32, of a vocabulary that may be divided
            slots, result: `[num_rows]` int64
        """
        marks = None if self.marks is None else self.marks.tensor
        positions, parameters = self.positions.tensor, self.parameters
        return vocabulary.draw(logits, slots, positions, parameters, may_truncate=self.may_truncate, marks=marks)


def _is_greedy(sampling: Sampling) -> bool:
    return sampling.temperature < LEAST_TEMPERATURE


def _inverse_temperature(sampling: Sampling) -> float:
    return 0.0 if _is_greedy(sampling) else 1.0 / sampling.temperature


def _log_min_p(sampling: Sampling) -> float:
    return math.log(sampling.min_p) if sampling.min_p > 0 else -math.inf
