"""How much attention queries pay to each block of a KV cache, in plain torch on any device."""

from __future__ import annotations

import torch

from kernels.quantized_kv import dequantize_heads


def block_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    block_tables: torch.Tensor,
    contexts: torch.Tensor,
    scale: float,
    soft_cap: float | None = None,
    kv_scales: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the probabilities with which queries attend, added up over each block, of the head with the largest sum.

    Shapes:
        query: `[num_seqs, num_queries, num_heads, head_dim]`
        key_cache, kv_scales, sinks: as for `kernels.paged_attention.paged_attention`
        block_tables: `[num_seqs, num_blocks]` int64
        contexts: `[num_seqs, num_queries]` int64, tokens that each query sees: the first ones
        result: `[num_seqs, num_queries, num_blocks]` float32
    """
    num_seqs, num_queries, num_heads, head_dim = query.shape
    keys = key_cache[block_tables]
    if kv_scales is not None:
        keys = dequantize_heads(keys, kv_scales[block_tables][..., 0].transpose(2, 3))
    block_size, num_kv_heads = keys.shape[2:4]
    # [num_seqs, num_kv_heads, num_queries * group, head_dim] by [num_seqs, num_kv_heads, head_dim, num_tokens].
    grouped = query.float().view(num_seqs, num_queries, num_kv_heads, -1, head_dim).transpose(1, 2).flatten(2, 3)
    scores = grouped @ keys.float().flatten(1, 2).permute(0, 2, 3, 1) * scale
    scores = scores.view(num_seqs, num_kv_heads, num_queries, num_heads // num_kv_heads, -1)
    if soft_cap is not None:
        scores = torch.tanh(scores / soft_cap) * soft_cap
    places = torch.arange(scores.shape[-1], device=scores.device)
    scores.masked_fill_(places >= contexts[:, None, :, None, None], float("-inf"))
    if sinks is not None:
        columns = sinks.float().view(1, num_kv_heads, 1, -1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, columns), dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : len(places)]
    return weights.reshape(*weights.shape[:-1], -1, block_size).sum(-1).amax((1, 3))
