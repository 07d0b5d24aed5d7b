"""Medusa heads: each predicts one token from the target's last hidden vector, the first the one behind the next.

Source: Cai et al., arXiv 2401.10774. Head `i` at place `p` learns the target's own distribution of token `p + 2 + i`.
A head without a vocabulary matrix of its own uses the target's, which makes the file small; readers that do not know
this need the matrices, which start as copies of the target's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpu_worker.models.config import ModelConfig
from ops.train_draft.distillation import kl_divergences
from ops.train_draft.rows import Batch
from ops.train_draft.target import Vocabulary

_DECAY = 0.8
"""Weight of each head's loss as a multiple of the weight of the head before."""


class ResidualBlock(nn.Module):
    """`x + silu(W x + b)`; begins almost as the identity."""

    def __init__(self, size: int) -> None:
        """Start with weights of zero."""
        super().__init__()
        self.linear = nn.Linear(size, size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Apply it to `x: [..., size]`."""
        return x + F.silu(self.linear(x))


class MedusaStudent:
    """The heads."""

    first_distance = 2

    def __init__(
        self, target: ModelConfig, vocabulary: Vocabulary, num_heads: int, num_layers: int, *, shares_head: bool
    ) -> None:
        """Create the heads.

        Args:
            target: Configuration of the target.
            vocabulary: Its matrices.
            num_heads: Tokens to predict.
            num_layers: Residual blocks of a head.
            shares_head: Use the target's vocabulary matrix; otherwise each head trains one of its own.
        """
        self._target = target
        self._vocabulary = vocabulary
        size = target.hidden_size
        self._blocks = nn.ModuleList(
            nn.Sequential(*(ResidualBlock(size) for _ in range(num_layers))) for _ in range(num_heads)
        )
        copies = [] if shares_head else [nn.Parameter(vocabulary.head.clone()) for _ in range(num_heads)]
        self._own = nn.ParameterList(copies)
        self.module = nn.ModuleList([self._blocks, self._own])

    def loss(self, batch: Batch) -> Tensor:
        """Return the weighted mean of the heads' divergences."""
        num_heads, length = len(self._blocks), batch.token_ids.shape[1]
        # All heads learn the same distributions, each from its own distance.
        ours = [
            blocks(batch.hidden[:, num_heads - ahead : length - ahead]).float().flatten(0, 1)
            for ahead, blocks in enumerate(self._blocks, 1)
        ]
        heads = [self._head(head) for head in range(num_heads)]
        losses = kl_divergences(ours, heads, batch.hidden[:, num_heads:].flatten(0, 1), self._vocabulary.head)
        weights = _DECAY ** torch.arange(num_heads)
        return losses @ (weights / weights.sum())

    def draft_tokens(self, batch: Batch, count: int) -> Tensor:
        """Return each head's likeliest token."""
        chosen = [
            F.linear(blocks(batch.hidden).float(), self._head(head)).argmax(-1)
            for head, blocks in enumerate(self._blocks[:count])
        ]
        return torch.stack(chosen, -1)

    def config(self) -> dict[str, Any]:
        """Return the heads' sizes."""
        first: Any = self._blocks[0]
        return {
            "medusa_num_heads": len(self._blocks),
            "medusa_num_layers": len(first),
            "hidden_size": self._target.hidden_size,
            "vocab_size": self._target.vocab_size,
        }

    def tensors(self) -> Mapping[str, Tensor]:
        """Return blocks as `{head}.{layer}.linear.*`, matrices as `{head}.{number of layers}.weight`."""
        tensors = dict(self._blocks.state_dict())
        for head, matrix in enumerate(self._own):
            tensors[f"{head}.{self.config()['medusa_num_layers']}.weight"] = matrix.detach()
        return tensors

    def _head(self, head: int) -> Tensor:
        return self._own[head] if len(self._own) else self._vocabulary.head
