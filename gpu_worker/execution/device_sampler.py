"""From logits to tokens on the device, launched without waiting, with what no row asks for left out.

The order is that of `sampler`: log probabilities of the model's own logits, then bias, penalties, and the draw.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from gpu_worker.execution.logprobs import Logprobs, LogprobTensors
from gpu_worker.execution.row_parameters import Needs, RowParameters
from gpu_worker.execution.step_layout import Int64s
from gpu_worker.execution.transfers import StagedArray, Upload
from kernels.sampling import sample_tokens


@dataclass(slots=True)
class SamplingRequest:
    """What the rows of a step ask of the sampler, on its way to the device.

    Attributes:
        needs: All that any row needs.
        bias_places: Flat indices into the logits, or None without bias.
        bias_values: What is added there.
        logprob_places: Rows of the logits that report log probabilities.
        num_top: How many alternatives each of those reports.
        staged_places: `logprob_places`, or None when there are none.
    """

    needs: Needs
    bias_places: StagedArray | None = None
    bias_values: StagedArray | None = None
    logprob_places: tuple[int, ...] = ()
    num_top: tuple[int, ...] = ()
    staged_places: StagedArray | None = None


class DeviceSampler:
    """Draws by the parameters of rows."""

    def __init__(self, parameters: RowParameters, vocab_size: int) -> None:
        """Read `parameters`; what is drawn is added to its counts."""
        self._parameters = parameters
        self._vocab_size = vocab_size

    def stage(self, rows: Int64s, upload: Upload) -> SamplingRequest:
        """Prepare to sample logits that belong to `rows`."""
        parameters = self._parameters
        row_needs = parameters.needs[rows]
        request = SamplingRequest(Needs(int(np.bitwise_or.reduce(row_needs)) if len(rows) else 0))
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

    def sample(
        self, logits: torch.Tensor, rows: torch.Tensor, request: SamplingRequest
    ) -> tuple[torch.Tensor, LogprobTensors | None]:
        """Draw a token for each row.

        Args:
            logits: Overwritten.
            rows: The same as were staged.
            request: From `stage`, its upload sent.

        Shapes:
            logits: `[num_rows, vocab_size]` float32, contiguous
            rows: `[num_rows]` int64
            result: `[num_rows]` int64, `INVALID_TOKEN` where the logits are no distribution
        """
        places = None if request.staged_places is None else request.staged_places.tensor
        logprobs = None if places is None else Logprobs(logits.index_select(0, places))
        if request.bias_places is not None and request.bias_values is not None:
            logits.view(-1).index_add_(0, request.bias_places.tensor, request.bias_values.tensor)
        token_ids = sample_tokens(
            logits,
            rows,
            self._parameters.values,
            self._parameters.penalties if Needs.PENALTIES in request.needs else None,
            may_truncate=Needs.TRUNCATION in request.needs,
        )
        if logprobs is None or places is None:
            return token_ids, None
        return token_ids, logprobs.report(token_ids.index_select(0, places).clamp_(min=0), max(request.num_top))
