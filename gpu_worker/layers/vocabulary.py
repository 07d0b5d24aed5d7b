"""From hidden vectors to scores of the vocabulary: the head at the top of a model."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gpu_worker.layers.ranks import ALONE, Ranks
from kernels.linear import Linear
from kernels.low_rank import AdapterRows, AdapterTable


@dataclass(frozen=True, slots=True, eq=False)
class LMHead:
    """Scores every token of the vocabulary for each hidden vector."""

    projection: Linear
    dtype: torch.dtype
    scale: float = 1.0
    soft_cap: float | None = None
    ranks: Ranks = ALONE
    vocab_size: int = 0
    adapters: AdapterTable | None = None

    def __call__(self, hidden: torch.Tensor, adapters: AdapterRows | None = None) -> torch.Tensor:
        """Return float32 logits `[num_rows, vocab_size]` for `hidden: [num_rows, hidden_size]` and their adapters.

        Where the vocabulary is divided, those are a rank's, as many on each: minus infinity behind the last token.
        """
        hidden = hidden if hidden.dtype is self.dtype else hidden.to(self.dtype)
        logits = self.projection.to_float32(hidden)
        if adapters is not None and self.adapters is not None:
            self.adapters.add(hidden, logits, adapters)
        if self.ranks.size > 1:
            own = self.vocab_size - self.ranks.rank * logits.shape[1]
            if own < logits.shape[1]:
                logits[:, max(0, own) :] = -torch.inf
        if self.scale != 1:
            logits.mul_(self.scale)
        if self.soft_cap is not None:
            logits.div_(self.soft_cap).tanh_().mul_(self.soft_cap)
        return logits
