"""Self-attention in both directions: it keeps nothing, since all tokens of its sequences are in the step."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch.nn import functional

from gpu_worker.layers.attention_context import AttentionContext
from gpu_worker.layers.linear import Linear
from kernels.rope_kv_write import HeadNormWeights, rope_kv_write


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
