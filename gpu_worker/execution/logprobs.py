"""Log probabilities for the client: of the model's own distribution, before bias, penalties and temperature."""

from __future__ import annotations

import torch

from gpu_worker.core.step import LogprobEntry


class Logprobs:
    """Normalised log probabilities of some rows, copied before the sampler changes the logits."""

    __slots__ = ("_values",)

    def __init__(self, logits: torch.Tensor) -> None:
        """Normalise.

        Shapes:
            logits: `[num_rows, vocab_size]` float32
        """
        self._values = torch.log_softmax(logits, dim=-1)

    def entries(self, token_ids: list[int], num_top: list[int]) -> list[LogprobEntry]:
        """Return one entry a row.

        Args:
            token_ids: The token of each row.
            num_top: How many most likely alternatives each row reports.
        """
        index = torch.tensor(token_ids, dtype=torch.int64, device=self._values.device)
        chosen = self._values.gather(1, index[:, None])[:, 0].tolist()
        most = min(max(num_top), self._values.shape[1])
        if most == 0:
            return [LogprobEntry(*pair) for pair in zip(token_ids, chosen, strict=True)]
        top_values, top_ids = self._values.topk(most)
        tops = zip(top_ids.tolist(), top_values.tolist(), num_top, strict=True)
        alternatives = [tuple(zip(ids[:count], values[:count], strict=True)) for ids, values, count in tops]
        return [LogprobEntry(*entry) for entry in zip(token_ids, chosen, alternatives, strict=True)]
