"""From logits to tokens on the device, launched without waiting, with what no row asks for left out.

The order is that of `sampler`: log probabilities of the model's own logits, then bias, penalties, and the draw.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from gpu_worker.execution.batch.sampled_rows import SampledRows
from gpu_worker.execution.batch.transfers import StagedArray, Upload
from gpu_worker.execution.sampling.logprobs import Logprobs, LogprobTensors
from gpu_worker.execution.sampling.row_parameters import Needs, RowParameters
from kernels.sampling import sample_tokens


@dataclass(slots=True)
class SamplingRequest:
    """What the rows of a step ask of the sampler, on its way to the device.

    Attributes:
        needs: All that any row needs.
        positions: Place in its output of what each row samples.
        verifies: Whether rows verify drafts, so that several may belong to one sequence.
        drafts: What penalties count as output before each row, filled up with -1; None where no row needs it.
        bias_places: Flat indices into the logits, or None without bias.
        bias_values: What is added there.
        logprob_places: Rows of the logits that report log probabilities.
        num_top: How many alternatives each of those reports.
        staged_places: `logprob_places`, or None when there are none.
    """

    needs: Needs
    positions: StagedArray
    verifies: bool
    drafts: StagedArray | None = None
    bias_places: StagedArray | None = None
    bias_values: StagedArray | None = None
    logprob_places: tuple[int, ...] = ()
    num_top: tuple[int, ...] = ()
    staged_places: StagedArray | None = None

    @property
    def may_truncate(self) -> bool:
        """Say whether any row is drawn from a part of its distribution."""
        return Needs.TRUNCATION in self.needs


@dataclass(frozen=True, slots=True)
class DrawnTokens:
    """What rows of logits led to, on the device.

    Attributes:
        token_ids: `[num_rows]` int64, `INVALID_TOKEN` where the logits are no distribution.
        logprob_places: Rows that report log probabilities.
        num_top: How many alternatives each of those reports.
        logprobs: Of those, or None.
    """

    token_ids: torch.Tensor
    logprob_places: tuple[int, ...] = ()
    num_top: tuple[int, ...] = ()
    logprobs: LogprobTensors | None = None


class DeviceSampler:
    """Draws by the parameters of rows."""

    def __init__(self, parameters: RowParameters, vocab_size: int) -> None:
        """Read `parameters`; what is drawn is added to its counts, but for rows that verify drafts."""
        self._parameters = parameters
        self._vocab_size = vocab_size

    def stage(self, sampled: SampledRows, upload: Upload) -> SamplingRequest:
        """Prepare to sample logits that belong to these rows."""
        parameters, rows = self._parameters, sampled.rows
        row_needs = parameters.needs[rows]
        needs = Needs(int(np.bitwise_or.reduce(row_needs)) if len(rows) else 0)
        request = SamplingRequest(needs, upload.add(sampled.positions), sampled.paths is not None)
        if sampled.paths is None:
            parameters.num_counted[rows] += 1
        elif Needs.PENALTIES in needs:
            request.drafts = upload.add(_padded(sampled.paths))
        if Needs.BIAS in request.needs:
            biases = [(place, parameters.bias[rows[place]]) for place in np.flatnonzero(row_needs & Needs.BIAS)]
            request.bias_places = upload.add(
                np.concatenate([ids + place * self._vocab_size for place, (ids, _) in biases])
            )
            request.bias_values = upload.add(np.concatenate([values for _, (_, values) in biases]))
        if Needs.LOGPROBS in request.needs:
            places = np.flatnonzero(row_needs & Needs.LOGPROBS)
            request.logprob_places = tuple(places.tolist())
            request.num_top = tuple(parameters.num_top[rows[places]].tolist())
            request.staged_places = upload.add(places)
        return request

    def sample(self, logits: torch.Tensor, rows: torch.Tensor, request: SamplingRequest) -> DrawnTokens:
        """Draw a token for each row.

        Args:
            logits: Overwritten.
            rows: The same as were staged.
            request: From `stage`, its upload sent.

        Shapes:
            logits: `[num_rows, vocab_size]` float32, contiguous
            rows: `[num_rows]` int64
        """
        places = None if request.staged_places is None else request.staged_places.tensor
        logprobs = None if places is None else Logprobs(logits.index_select(0, places))
        if request.bias_places is not None and request.bias_values is not None:
            logits.view(-1).index_add_(0, request.bias_places.tensor, request.bias_values.tensor)
        token_ids = sample_tokens(
            logits,
            rows,
            request.positions.tensor,
            self._parameters.values,
            self._parameters.penalties if Needs.PENALTIES in request.needs else None,
            None if request.drafts is None else request.drafts.tensor,
            may_truncate=request.may_truncate,
        )
        if logprobs is None or places is None:
            return DrawnTokens(token_ids)
        report = logprobs.report(token_ids.index_select(0, places).clamp_(min=0), max(request.num_top))
        return DrawnTokens(token_ids, request.logprob_places, request.num_top, report)


def _padded(paths: list[tuple[int, ...]]) -> np.ndarray:
    """Return paths as the rows of an array, filled up with -1."""
    padded = np.full((len(paths), max(1, *map(len, paths))), -1, dtype=np.int64)
    for row, path in enumerate(paths):
        padded[row, : len(path)] = path
    return padded
