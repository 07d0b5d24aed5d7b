"""From tokens to vectors: a row of a table for each."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gpu_worker.layers.norms import Norm
from gpu_worker.layers.ranks import ALONE, Ranks


@dataclass(frozen=True, slots=True)
class Embedding:
    """From tokens to the residual stream, or to what layers are given besides.

    Attributes:
        weight: `[vocab_size, size]`; of a vocabulary that is divided, the rows of this rank's tokens.
        dtype: Of the result.
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
        words: Rows of the tokens.
        norm: Of each row.
        segment: `[size]`, which is added to each row before; None where nothing is.
    """

    words: Embedding
    norm: Norm
    segment: torch.Tensor | None = None

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return `[num_tokens, size]`."""
        rows = self.words(token_ids)
        return self.norm(rows if self.segment is None else rows.add_(self.segment))
