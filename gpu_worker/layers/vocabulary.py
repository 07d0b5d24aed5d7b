"""From hidden vectors to scores of the vocabulary: the head at the top of a model."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gpu_worker.layers.norms import Norm
from gpu_worker.layers.ranks import ALONE, Ranks
from kernels.linear import Linear
from kernels.low_rank import AdapterRows, AdapterTable


@dataclass(frozen=True, slots=True)
class Embedding:
    """From tokens to the residual stream, or to what layers are given besides.

    Attributes:
        weight: `[vocab_size, size]`; of a vocabulary that is divided, the rows of this rank's tokens.
        scale: What the rows are multiplied by; checkpoints were trained with the nearest number of their type.
        ranks: Among which the vocabulary is divided.
    """

    weight: torch.Tensor
    dtype: torch.dtype
    scale: float = 1.0
    ranks: Ranks = ALONE

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return `[num_tokens, size]`."""
        rows = self._rows(token_ids)
        return rows if self.scale == 1 else rows.mul_(self.scale)

    def _rows(self, token_ids: torch.Tensor) -> torch.Tensor:
        if self.ranks.size == 1:
            return torch.embedding(self.weight, token_ids).to(self.dtype)
        num_own = len(self.weight)
        places = token_ids - self.ranks.rank * num_own
        rows = torch.embedding(self.weight, places.clamp(0, num_own - 1)).to(self.dtype)
        return self.ranks.sum(rows.masked_fill_(((places < 0) | (places >= num_own))[:, None], 0))


@dataclass(frozen=True, slots=True)
class NormedEmbedding:
    """From tokens to a normalised stream.

    Attributes:
        segment: `[size]`, which is added to each row before; None where nothing is.
    """

    words: Embedding
    norm: Norm
    segment: torch.Tensor | None = None

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return `[num_tokens, size]`."""
        rows = self.words(token_ids)
        return self.norm(rows if self.segment is None else rows.add_(self.segment))


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
