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

    __slots__ = ("_ends", "_is_same")

    def __init__(self, query_starts: torch.Tensor, sequences: torch.Tensor) -> None:
        """Describe a step.

        Shapes:
            query_starts: `[num_seqs + 1]` int32, the first token of each sequence, then the end of the last
            sequences: `[num_tokens]` int64, of each token the number of its sequence; tokens of padding may have none
        """
        self._ends: list[int] | None = query_starts.tolist() if query_starts.is_cpu else None
        self._is_same = None if self._ends is not None else sequences[:, None] == sequences[None, :]

    def __call__(self, heads: torch.Tensor) -> torch.Tensor:
        """Attend. Tokens of padding that belong to no sequence get numbers that mean nothing.

        Shapes:
            heads: `[3, num_heads, num_tokens, head_dim]`, queries, keys and values
            result: `[num_heads, num_tokens, head_dim]`
        """
        if self._ends is None:
            query, key, value = heads[:, None].unbind(0)
            return functional.scaled_dot_product_attention(query, key, value, attn_mask=self._is_same)[0]
        attended = torch.zeros(heads.shape[1:], dtype=heads.dtype)
        for first, end in pairwise(self._ends):
            if first < end:
                # Copied, so that products read the same places of memory's lines wherever the sequence lies.
                query, key, value = heads[:, None, :, first:end].contiguous().unbind(0)
                attended[:, first:end] = functional.scaled_dot_product_attention(query, key, value)[0]
        return attended
