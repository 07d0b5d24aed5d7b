"""The layers of an encoder: every token attends to all tokens of its sequence, which are all in the step.

Nothing of a step is kept: there is no cache of keys and values.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from gpu_worker.layers.attention_context import AttentionContext
from gpu_worker.layers.bidirectional_attention import WholeAttention, sequences_of
from gpu_worker.layers.linear import Projection
from gpu_worker.layers.norms import LayerNorm
from kernels.activation import Activation, activate
from kernels.linear import LinearFactory


@dataclass(frozen=True, slots=True)
class EncoderEmbeddings:
    """What a token's first vector is the sum of.

    Attributes:
        words: `[vocab_size, hidden_size]`.
        positions: `[num_positions, hidden_size]`.
        segments: `[num_segments, hidden_size]`.
        first_position: Row of `positions` of a sequence's first token.
        separator: Token behind which the second segment begins; None where there is one segment.
    """

    words: torch.Tensor
    positions: torch.Tensor
    segments: torch.Tensor
    norm: LayerNorm
    first_position: int
    separator: int | None

    def __call__(self, token_ids: torch.Tensor, positions: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        """Return the first vectors; `starts` is the place of each token's sequence in the step."""
        x = torch.embedding(self.words, token_ids).to(self.positions.dtype)
        x += torch.embedding(self.positions, positions + self.first_position)
        x += torch.embedding(self.segments, self._segments(token_ids, starts))
        return self.norm(x)

    def _segments(self, token_ids: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        if self.separator is None:
            return torch.zeros_like(token_ids)
        is_separator = (token_ids == self.separator).long()
        num_before = is_separator.cumsum(0) - is_separator
        return (num_before > num_before.index_select(0, starts)).long()


@dataclass(frozen=True, slots=True)
class EncoderLayerWeights:
    """Everything that distinguishes a layer, as a checkpoint gives it."""

    qkv: Projection
    output: Projection
    attention_norm: LayerNorm
    inner: Projection
    outer: Projection
    norm: LayerNorm


class EncoderLayer:
    """Attention and feed-forward block, each with its normalisation behind it."""

    def __init__(
        self, weights: EncoderLayerWeights, num_heads: int, activation: Activation, linears: LinearFactory
    ) -> None:
        parts = (weights.qkv, weights.output, weights.inner, weights.outer)
        self._qkv, self._output, self._inner, self._outer = (linears.make(part.weight, part.bias) for part in parts)
        self._attention_norm = weights.attention_norm
        self._norm = weights.norm
        self._num_heads = num_heads
        self._activation = activation

    def __call__(self, x: torch.Tensor, attention: WholeAttention) -> torch.Tensor:
        """Return the layer's vectors."""
        heads = self._qkv(x).view(len(x), 3, self._num_heads, -1).permute(1, 2, 0, 3)
        x = self._attention_norm(x + self._output(attention(*heads).transpose(0, 1).reshape(x.shape)))
        return self._norm(x + self._outer(activate(self._inner(x), self._activation)))


class Encoder:
    """Embeddings and layers, in the place of a decoder's. Holds weights only."""

    def __init__(self, embeddings: EncoderEmbeddings, layers: Iterable[EncoderLayer]) -> None:
        self._embeddings = embeddings
        self._layers = list(layers)

    def __call__(self, token_ids: torch.Tensor, positions: torch.Tensor, context: AttentionContext) -> torch.Tensor:
        """Do what `DecoderForm` promises, without a cache: of each sequence all tokens are in the step."""
        sequences = sequences_of(context.query_starts, len(token_ids))
        # Tokens of padding may belong to no sequence.
        starts = context.query_starts.long().index_select(0, sequences.clamp(max=len(context.query_starts) - 1))
        attention = WholeAttention(context.query_starts, sequences)
        x = self._embeddings(token_ids, positions, starts.clamp(max=len(token_ids) - 1))
        for layer in self._layers:
            x = layer(x, attention)
        return x

    def first(self, num_layers: int) -> Encoder:
        """Do what `DecoderForm` promises."""
        short = copy.copy(self)
        short._layers = self._layers[:num_layers]
        return short
