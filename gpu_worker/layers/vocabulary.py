"""Vectors of tokens and scores of tokens: the embedding, the head, and how tokens are drawn by scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gpu_worker.layers.norms import Norm
from gpu_worker.layers.ranks.rank import ALONE, Ranks
from kernels import sampling
from kernels.decoder_stack import StackInputs
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

    def stack_inputs(self, vocab_size: int | None = None, adapters: int | None = None) -> StackInputs:
        """Describe it to the fused kernels; `adapters` is the address of the table beside it."""
        # Embeddings of all ranks are added up.
        first, adapters = self.ranks.rank * len(self.weight), adapters if self.ranks.rank == 0 else None
        return StackInputs(self.weight, self.dtype, self.ranks.exchange, vocab_size, adapters, first)

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
        if self.scale != 1:
            logits.mul_(self.scale)
        if self.soft_cap is not None:
            logits.div_(self.soft_cap).tanh_().mul_(self.soft_cap)
        if self.ranks.size > 1:
            logits[:, max(0, self.vocab_size - self.ranks.rank * logits.shape[1]) :] = -torch.inf
        return logits


class Vocabulary:
    """How tokens are drawn and scored by their logits, `[num_rows, vocab_size]` float32.

    Where `is_first`, the grammars of outputs are known.
    """

    is_first = True
    draw, score = staticmethod(sampling.sample_tokens), staticmethod(sampling.score_tokens)

    def widened(self, logits: torch.Tensor) -> torch.Tensor:
        """Return logits that have a column for every token."""
        return logits

    def highest(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the highest logit of each row, `[num_rows]`."""
        return logits.amax(1)

    def values(self, logits: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """Return logits of some tokens of each row, both of that shape: `[num_rows, num_tokens]`."""
        return logits.gather(1, token_ids)

    def columns(self, logits: torch.Tensor, token_ids: Sequence[int]) -> torch.Tensor:
        """Return the logits of the same tokens of all rows, `[num_rows, num_tokens]`; nothing waits for the device."""
        return torch.stack([logits[:, token_id] for token_id in token_ids], dim=1)

    def share(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return numbers as they are where `is_first`; they may be overwritten."""
        return numbers
