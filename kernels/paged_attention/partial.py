"""Attention to a part of the tokens of a sequence, and what parts come to together.

Source: Dao et al., "Flash-Decoding for long-context inference", 2023.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.layer_cache import CachedTokens


@dataclass(frozen=True, slots=True)
class Partial:
    """That a cache has some of the tokens that a query attends to.

    Attributes:
        tokens: Those that the cache has, one after another in its blocks.
        lse: `[num_tokens, num_heads]` float32, overwritten by the log of each row's sum of exponentials: -inf for a row
            that sees none of these tokens.
    """

    tokens: CachedTokens
    lse: torch.Tensor


def merge_partials(values: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor | None = None) -> torch.Tensor:
    """Return what attention to all tokens comes to, zeros for a row that sees none; `sinks` join the softmax.

    Shapes:
        values: `[num_parts, num_tokens, num_heads, value_dim]` float32
        lse: `[num_parts, num_tokens, num_heads]` float32
        sinks: `[num_heads]` float32
        result: `[num_tokens, num_heads, value_dim]` float32
    """
    total = torch.logsumexp(lse, 0)
    if sinks is not None:
        total = torch.logaddexp(total, sinks)
    weights = torch.exp(lse - total.clamp(min=torch.finfo(total.dtype).min))
    return (values * weights[..., None]).sum(0)
