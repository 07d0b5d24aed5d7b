"""The layers of an encoder: every token attends to all tokens of its sequence, which are all in the step.

Nothing of a step is kept: there is no cache of keys and values.

Self-attention in both directions: it keeps nothing, since all tokens of its sequences are in the step.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch.nn import functional

from gpu_worker.layers.attention_context import AttentionContext
from gpu_worker.layers.linear import Linear, Projection
from gpu_worker.layers.norms import LayerNorm
from kernels.activation import Activation, activate
from kernels.linear import LinearFactory
from kernels.rope_kv_write import HeadNormWeights, rope_kv_write


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


class WholeAttention:
    """Keeps the sequences of one step apart.

    On a CPU sequences are computed one by one: nothing is computed for pairs of tokens of different sequences, and a
    sequence's bits are the same alone and beside others. Elsewhere a mask over all tokens of the step keeps them apart,
    which needs no lengths on the host, and so can be captured.
    """

    def __init__(self, query_starts: torch.Tensor, sequences: torch.Tensor) -> None:
        """Describe a step.

        Shapes:
            query_starts: `[num_seqs + 1]` int32, the first token of each sequence, then the end of the last
            sequences: `[num_tokens]` int64, of each token the number of its sequence; tokens of padding may have none
        """
        self._ends: list[int] | None = query_starts.tolist() if query_starts.is_cpu else None
        self._is_same = None if self._ends is not None else sequences[:, None] == sequences[None, :]

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scale: float | None = None,
        window: int | None = None,
    ) -> torch.Tensor:
        """Attend. Tokens of padding that belong to no sequence get numbers that mean nothing.

        Shapes:
            query, result: `[num_heads, num_tokens, head_dim]`
            key, value: `[num_kv_heads, num_tokens, head_dim]`, each for as many query heads, one after another
        """
        if self._ends is None:
            mask = self._is_same
            assert mask is not None
            if window is not None:
                mask = mask & _near(query.shape[1], window, query.device)
            q, k, v = (part[None] for part in _for_each_query(query, key, value))
            return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)[0]
        attended = torch.zeros_like(query, memory_format=torch.contiguous_format)
        for first, end in pairwise(self._ends):
            if first < end:
                near = None if window is None or end - first <= window else _near(end - first, window, query.device)
                # Copied, so that products read the same places of memory's lines wherever the sequence lies.
                q, k, v = _for_each_query(*(part[None, :, first:end].contiguous() for part in (query, key, value)))
                attended[:, first:end] = functional.scaled_dot_product_attention(q, k, v, near, scale=scale)[0]
        return attended


def sequences_of(query_starts: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Return the number of each token's sequence, `[num_tokens]` int64; the tokens lie sequence by sequence."""
    places = torch.arange(num_tokens, device=query_starts.device)
    return torch.searchsorted(query_starts[1:].long(), places, right=True)


def _near(num_tokens: int, window: int, device: torch.device) -> torch.Tensor:
    places = torch.arange(num_tokens, device=device)
    return (places[:, None] - places[None, :]).abs() < window


def _for_each_query(*heads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    query, key, value = heads
    count = query.shape[-3] // key.shape[-3]
    if count == 1:
        return query, key, value
    return query, key.repeat_interleave(count, -3), value.repeat_interleave(count, -3)


class BidirectionalAttention:
    """Grouped-query attention of tokens to all of their sequence, or to those that are near."""

    def __init__(
        self,
        sizes: tuple[int, int, int],
        scale: float | None,
        window: int | None,
        norm: HeadNormWeights | None,
        qkv: Linear,
        output: Linear,
        cos_sin: torch.Tensor,
    ) -> None:
        self._sizes = sizes
        self._scale = scale
        self._window = window
        self._qkv = qkv
        self._output = output
        self._cos_sin = cos_sin
        self._head_norms: tuple[HeadNormWeights, ...] = ()
        if norm is not None:
            self._head_norms = tuple(HeadNormWeights(weight, weight, norm.eps) for weight in (norm.query, norm.key))

    def __call__(self, x: torch.Tensor, positions: torch.Tensor, context: AttentionContext) -> torch.Tensor:
        """Attend within the sequences of `x`."""
        num_tokens, (num_heads, num_kv_heads, head_dim) = len(x), self._sizes
        heads = self._qkv(x, context).view(num_tokens, -1, head_dim)
        turned, value = heads[:, :-num_kv_heads], heads[:, -num_kv_heads:]
        query, key = turned.tensor_split([num_heads], dim=1)
        if self._head_norms:
            for part, norm in zip((query, key), self._head_norms, strict=True):
                self._turn(part, positions, context, norm)
        else:
            # Keys turn as queries do: to the kernel all are queries of a layer that keeps nothing.
            self._turn(turned, positions, context, None)
        attention = WholeAttention(context.query_starts, sequences_of(context.query_starts, num_tokens))
        attended = attention(
            *(part.transpose(0, 1) for part in (query, key, value)), scale=self._scale, window=self._window
        )
        return self._output(attended.transpose(0, 1).reshape(num_tokens, -1), context)

    def _turn(
        self, heads: torch.Tensor, positions: torch.Tensor, context: AttentionContext, norm: HeadNormWeights | None
    ) -> None:
        rope_kv_write(heads, positions, self._cos_sin, None, None, context.slot_mapping, norm)
