"""From tokens to vectors: a row of a table for each."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gpu_worker.layers.norms import Norm


@dataclass(frozen=True, slots=True)
class Embedding:
    """From tokens to the residual stream, or to what layers are given besides.

    Attributes:
        weight: `[vocab_size, size]`.
        dtype: Of the result.
        scale: What the rows are multiplied by; checkpoints were trained with the nearest number of their type.
    """

    weight: torch.Tensor
    dtype: torch.dtype
    scale: float = 1.0

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return `[num_tokens, size]`."""
        rows = torch.embedding(self.weight, token_ids).to(self.dtype)
        return rows if self.scale == 1 else rows.mul_(self.scale)


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
