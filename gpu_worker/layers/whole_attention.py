"""Attention in both directions: every token of a sequence attends to all of them, which are all in the step."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch.nn import functional


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
