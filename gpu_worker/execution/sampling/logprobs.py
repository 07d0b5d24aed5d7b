"""Log probabilities for the client: of the model's own distribution, before bias, penalties and temperature."""

from __future__ import annotations

from collections.abc import Sequence as Values
from dataclasses import dataclass

import numpy as np
import torch

from gpu_worker.core.sequence import Sequence
from gpu_worker.core.step import LogprobEntry
from gpu_worker.execution.batch.layout import Int64s
from gpu_worker.execution.batch.sampled_rows import SampledRows
from gpu_worker.execution.batch.transfers import StagedArray, Upload
from kernels.sampling import TokenScores, score_tokens


def entries(scores: TokenScores, token_ids: Values[int], num_top: Values[int]) -> list[LogprobEntry]:
    """Return one entry a row of scores, which are on the host.

    Args:
        scores: Of all rows.
        token_ids: The token of each row.
        num_top: How many alternatives each row reports.
    """
    columns = (scores.chosen.tolist(), scores.top_ids.tolist(), scores.top_values.tolist())
    return [
        LogprobEntry(token_id, chosen, tuple(zip(ids[:count], values[:count], strict=True)))
        for token_id, count, chosen, ids, values in zip(token_ids, num_top, *columns, strict=True)
    ]


class LogprobRows:
    """Keeps how many alternatives each row of the batch reports."""

    def __init__(self, num_rows: int) -> None:
        """Report nothing yet."""
        self._num_top = np.zeros(num_rows, dtype=np.int64)

    def assign(self, rows: Values[int], newcomers: Values[Sequence]) -> None:
        """Keep what sequences ask for that were given rows."""
        self._num_top[rows] = [sequence.sampling.logprobs or 0 for sequence in newcomers]

    def stage(self, sampled: SampledRows, places: Int64s, upload: Upload) -> StagedLogprobs:
        """Prepare to report `places` of the rows of logits, at least one."""
        num_top = self._num_top[sampled.rows[places]].tolist()
        return StagedLogprobs(places.tolist(), num_top, upload.add(places))


@dataclass(frozen=True, slots=True)
class StagedLogprobs:
    """The reports of a step.

    Attributes:
        places: Rows of logits that report.
        num_top: How many alternatives each of these reports.
    """

    places: list[int]
    num_top: list[int]
    _index: StagedArray

    def keep(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the logits of the rows that report, before anything changes them."""
        return logits.index_select(0, self._index.tensor)

    def score(self, kept: torch.Tensor, token_ids: torch.Tensor) -> TokenScores:
        """Score what was drawn for all rows of logits; the scores of invalid tokens mean nothing."""
        return score_tokens(kept, token_ids.index_select(0, self._index.tensor).clamp_(min=0), max(self.num_top))
