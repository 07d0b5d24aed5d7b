"""From logits to tokens, for all rows of a batch together; what no row asks for costs nothing.

Order: log probabilities are taken from the model's own logits; then come the features in the order of `_features`; then
one draw with the uniform number of (seed, position in the output). Nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence as Values
from dataclasses import dataclass, field

import numpy as np
import torch

from gpu_worker.core.sequence import Sequence
from gpu_worker.execution.batch.sampled_rows import SampledRows
from gpu_worker.execution.batch.transfers import StagedArray, Upload
from gpu_worker.execution.sampling.bias import Bias
from gpu_worker.execution.sampling.distribution import Distributions, StagedDraw
from gpu_worker.execution.sampling.feature import Feature, StagedFeature
from gpu_worker.execution.sampling.logprobs import LogprobRows, StagedLogprobs
from gpu_worker.execution.sampling.penalties import Penalties
from kernels.sampling import TokenScores


def _features(num_rows: int, vocab_size: int, device: torch.device) -> list[Feature]:
    """Make all features that change logits, in the order in which they do."""
    return [Bias(vocab_size), Penalties(num_rows, vocab_size, device)]


@dataclass(slots=True)
class StagedSampling:
    """What the rows of a step ask of the sampler, on its way to the device.

    Attributes:
        slots: The row in the batch of each row of logits.
        draw: How tokens are drawn.
        features: What changes the logits before.
        logprobs: Log probabilities to report; None without.
    """

    slots: StagedArray
    draw: StagedDraw
    features: list[StagedFeature] = field(default_factory=list)
    logprobs: StagedLogprobs | None = None


@dataclass(frozen=True, slots=True)
class DrawnTokens:
    """What rows of logits led to, on the device.

    Attributes:
        token_ids: `[num_rows]` int64, `INVALID_TOKEN` where the logits are no distribution.
        staged_logprobs: Which rows report log probabilities, and how many.
        scores: Of those, or None.
    """

    token_ids: torch.Tensor
    staged_logprobs: StagedLogprobs | None = None
    scores: TokenScores | None = None


class Sampler:
    """Owns what is kept of sampling for each row of the batch."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        """Allocate the tables of `num_rows` rows."""
        self._distributions = Distributions(num_rows, vocab_size, device)
        self._features = _features(num_rows, vocab_size, device)
        self._logprobs = LogprobRows(num_rows)
        # Bit `i` says whether a row asks for feature `i`.
        self._asks = np.zeros(num_rows, dtype=np.int64)

    def assign(self, newcomers: Values[Sequence], upload: Upload) -> None:
        """Keep what sequences ask for that were given a row."""
        if not newcomers:
            return
        rows = [sequence.row for sequence in newcomers if sequence.row is not None]
        self._distributions.assign(rows, newcomers, upload)
        self._logprobs.assign(rows, newcomers)
        self._asks[rows] = 0
        for bit, feature in enumerate(self._features):
            for row, sequence in zip(rows, newcomers, strict=True):
                if feature.is_asked_by(sequence.sampling):
                    feature.assign(row, sequence, upload)
                    self._asks[row] |= 1 << bit

    def stage(self, sampled: SampledRows, upload: Upload) -> StagedSampling:
        """Prepare to sample logits that belong to these rows, at least one."""
        staged = StagedSampling(upload.add(sampled.rows), self._distributions.stage(sampled, upload))
        staged.logprobs = self._logprobs.stage(sampled, upload)
        asks = self._asks[sampled.rows]
        if asks.any():
            for bit, feature in enumerate(self._features):
                places = np.flatnonzero(asks & 1 << bit)
                if len(places):
                    staged.features.append(feature.stage(sampled, places, upload))
        return staged

    def sample(self, logits: torch.Tensor, staged: StagedSampling) -> DrawnTokens:
        """Draw a token for each row.

        Args:
            logits: Overwritten.
            staged: From `stage`, its upload sent.

        Shapes:
            logits: `[num_rows, vocab_size]` float32, contiguous
        """
        slots, logprobs = staged.slots.tensor, staged.logprobs
        kept = None if logprobs is None else logprobs.keep(logits)
        for feature in staged.features:
            feature.adjust(logits, slots)
        token_ids = staged.draw.draw(logits, slots)
        for feature in staged.features:
            feature.take_drawn(slots, token_ids)
        if logprobs is None or kept is None:
            return DrawnTokens(token_ids)
        return DrawnTokens(token_ids, logprobs, logprobs.score(kept, token_ids))
