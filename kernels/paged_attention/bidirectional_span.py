"""Attention from a run of tokens that see one another in both directions, and what is before them: images of Gemma."""

from __future__ import annotations

import torch

from kernels.layer_cache import LayerCache
from kernels.paged_attention.reference import attend
from kernels.quantized_kv import dequantize_heads


def bidirectional_span_attention(
    query: torch.Tensor,
    cache: LayerCache,
    block_table: torch.Tensor,
    num_before: int,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
) -> torch.Tensor:
    """Attend from all tokens of the run, whose keys and values are in the cache, in fp32.

    Args:
        query: Of the run's tokens.
        cache: Of the layer.
        block_table: Of the sequence; the run follows `num_before` tokens.
        num_before: Tokens of the sequence before the run.
        scale: What scores are multiplied by.
        sliding_window: How far back a token sees, itself included; forth it sees to the end of the run.
        soft_cap: Bounds scores.

    Shapes:
        query: `[num_tokens, num_heads, head_dim]`
        block_table: `[max_blocks]`
        result: `[num_tokens, num_heads, value_dim]`
    """
    size, end = cache.keys.shape[1], num_before + len(query)
    first = 0 if sliding_window is None else max(0, num_before - sliding_window + 1) // size
    blocks = block_table[first : -(-end // size)].long()
    keys, values = cache.keys[blocks], cache.values[blocks]
    if cache.scales is not None:
        key_scales, value_scales = cache.scales[blocks].transpose(1, 2).unbind(-1)
        keys, values = dequantize_heads(keys, key_scales), dequantize_heads(values, value_scales)
    keys, values = (cached.flatten(0, 1)[: end - first * size] for cached in (keys, values))
    places = torch.arange(num_before, end, device=query.device)[:, None]
    distance = places - torch.arange(first * size, end, device=query.device)
    hidden = torch.zeros_like(distance, dtype=torch.bool) if sliding_window is None else distance >= sliding_window
    return attend(query, keys, values, hidden, scale, soft_cap, None)
