"""Log probabilities for the client: of the model's own distribution, before bias, penalties and temperature."""

from __future__ import annotations

from collections.abc import Sequence as Values
from dataclasses import dataclass

import torch

from gpu_worker.core.step import LogprobEntry


@dataclass(frozen=True, slots=True)
class LogprobTensors:
    """Log probabilities of one token a row and of the most likely alternatives, on the device or on the host.

    Attributes:
        chosen: `[num_rows]` float32.
        top_ids: `[num_rows, most]` int64, most likely first.
        top_values: `[num_rows, most]` float32.
    """

    chosen: torch.Tensor
    top_ids: torch.Tensor
    top_values: torch.Tensor

    def entries(self, token_ids: Values[int], num_top: Values[int]) -> list[LogprobEntry]:
        """Return one entry a row.

        Args:
            token_ids: The token of each row.
            num_top: How many alternatives each row reports.
        """
        columns = (self.chosen.tolist(), self.top_ids.tolist(), self.top_values.tolist())
        return [
            LogprobEntry(token_id, chosen, tuple(zip(ids[:count], values[:count], strict=True)))
            for token_id, count, chosen, ids, values in zip(token_ids, num_top, *columns, strict=True)
        ]


class Logprobs:
    """Normalised log probabilities of some rows, copied before the sampler changes the logits."""

    __slots__ = ("_values",)

    def __init__(self, logits: torch.Tensor) -> None:
        """Normalise.

        Shapes:
            logits: `[num_rows, vocab_size]` float32
        """
        self._values = torch.log_softmax(logits, dim=-1)

    def report(self, token_ids: torch.Tensor, most: int) -> LogprobTensors:
        """Pick out one token a row and the `most` most likely ones, without waiting for the device.

        Shapes:
            token_ids: `[num_rows]` int64
        """
        chosen = self._values.gather(1, token_ids[:, None])[:, 0]
        top_values, top_ids = self._values.topk(min(most, self._values.shape[1]))
        return LogprobTensors(chosen, top_ids, top_values)

    def entries(self, token_ids: list[int], num_top: list[int]) -> list[LogprobEntry]:
        """Return one entry a row; as for `LogprobTensors.entries`."""
        index = torch.tensor(token_ids, dtype=torch.int64, device=self._values.device)
        return self.report(index, max(num_top)).entries(token_ids, num_top)
