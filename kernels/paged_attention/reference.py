"""Paged attention in plain torch, of all tokens or of parts: the oracle of the kernels, and what runs without them."""

from __future__ import annotations

from dataclasses import replace

import torch

from kernels.layer_cache import EVERY_TOKEN, CachedTokens, LayerCache, dequantize_heads
from kernels.paged_attention.options import AttentionOptions, Partial


def merge_partials(values: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor | None = None) -> torch.Tensor:
    """Return what attention to all tokens comes to, zeros for a row that sees none; `sinks` join the softmax.

    Shapes:
        values: `[num_parts, num_tokens, num_heads, value_dim]` float32
        lse: `[num_parts, num_tokens, num_heads]` float32
        sinks: `[num_heads]` float32
        result: `[num_tokens, num_heads, value_dim]` float32

    Source: Dao et al., "Flash-Decoding for long-context inference", 2023.
    """
    total = torch.logsumexp(lse, 0)
    if sinks is not None:
        total = torch.logaddexp(total, sinks)
    weights = torch.exp(lse - total.clamp(min=torch.finfo(total.dtype).min))
    return (values * weights[..., None]).sum(0)


_MAX_GATHERED = 1 << 23
"""Numbers of keys that `block_attention` gathers at once, 32 MiB in float32."""


def paged_attention_reference(
    query: torch.Tensor,
    cache: LayerCache,
    block_tables: torch.Tensor,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    max_query_len: int,
    max_context_len: int,
    options: AttentionOptions,
    partial: Partial | None = None,
) -> torch.Tensor:
    """Compute what `kernels.paged_attention.paged_attention` promises, one sequence at a time, in fp32.

    An empty context, which padding rows of a batch have, yields zeros.
    """
    tokens, dtype = (EVERY_TOKEN, query.dtype) if partial is None else (partial.tokens, torch.float32)
    result = torch.zeros(*query.shape[:2], cache.values.shape[3], dtype=dtype, device=query.device)
    if partial is not None:
        partial.lse.fill_(float("-inf"))
        options = replace(options, sinks=None)
    starts, lengths = query_starts.tolist(), context_lens.tolist()
    for sequence, context_len in enumerate(lengths):
        rows = slice(starts[sequence], starts[sequence + 1])
        num_cached = len(range(tokens.first, context_len, tokens.step))
        blocks = block_tables[sequence, : -(-num_cached // cache.keys.shape[1])].long()
        keys, values = (cached[:num_cached] for cached in _read(cache, blocks))
        if num_cached > 0 and starts[sequence] < starts[sequence + 1]:
            hidden = _hidden(rows.stop - rows.start, context_len, options, tokens, query.device)
            result[rows], lse = _attend(query[rows], keys, values, hidden, options)
            if partial is not None:
                partial.lse[rows] = lse
    return result


def _read(cache: LayerCache, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the keys and values of some blocks, `[num_tokens, num_kv_heads, head_dim]`."""
    keys, values = cache.keys[blocks], cache.values[blocks]
    if cache.scales is not None:
        key_scales, value_scales = cache.scales[blocks].transpose(1, 2).unbind(-1)
        keys, values = dequantize_heads(keys, key_scales), dequantize_heads(values, value_scales)
    return keys.flatten(0, 1), values.flatten(0, 1)


def _hidden(
    num_queries: int, context_len: int, options: AttentionOptions, tokens: CachedTokens, device: torch.device
) -> torch.Tensor:
    slots = torch.arange(context_len - num_queries, context_len, device=device)[:, None]
    distance = slots - torch.arange(tokens.first, context_len, tokens.step, device=device)
    hidden = distance < 0
    if options.sliding_window is not None:
        hidden |= distance >= options.sliding_window
    if options.chunk_size is not None:
        hidden |= distance > slots % options.chunk_size
    return hidden


def _attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, hidden: torch.Tensor, options: AttentionOptions
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend from some tokens to those that are not hidden, in float32; also return logs of sums of exponentials."""
    num_queries, _, head_dim = query.shape
    context_len, num_kv_heads, _ = keys.shape
    # [kv_head, group * num_queries, head_dim]: the query heads that share a KV head are one matrix.
    grouped = query.float().view(num_queries, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3).flatten(1, 2)
    scores = _capped(grouped @ keys.float().permute(1, 2, 0), options)
    scores = scores.view(num_kv_heads, -1, num_queries, context_len).masked_fill_(hidden, float("-inf"))
    if options.sinks is not None:
        columns = options.sinks.view(num_kv_heads, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, columns), dim=-1)
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - lse.clamp(min=torch.finfo(lse.dtype).min)[..., None])[..., :context_len]
    attended = weights.flatten(1, 2) @ values.float().transpose(0, 1)
    heads = attended.view(num_kv_heads, -1, num_queries, values.shape[2])
    return heads.permute(2, 0, 1, 3).flatten(1, 2), lse.flatten(0, 1).T


def _capped(products: torch.Tensor, options: AttentionOptions) -> torch.Tensor:
    scores = products * options.scale
    return scores if options.soft_cap is None else torch.tanh(scores / options.soft_cap) * options.soft_cap


def block_attention(
    query: torch.Tensor,
    cache: LayerCache,
    block_tables: torch.Tensor,
    contexts: torch.Tensor,
    options: AttentionOptions,
) -> torch.Tensor:
    """Return the probabilities with which queries attend, added up over each block, of the head with the largest sum.

    Some blocks after the others, so that long sequences take no more memory than a few blocks' keys. Every query sees
    all tokens up to itself.

    Shapes:
        query: `[num_seqs, num_queries, num_heads, head_dim]`
        block_tables: `[num_seqs, num_blocks]` int64
        contexts: `[num_seqs, num_queries]` int64, tokens that each query sees: the first ones
        result: `[num_seqs, num_queries, num_blocks]` float32
    """
    num_seqs, num_queries = query.shape[:2]
    block_size, num_kv_heads, head_dim = cache.keys.shape[1:]
    # [num_seqs, num_kv_heads, num_queries * group, head_dim] by [num_seqs, num_kv_heads, head_dim, num_tokens].
    grouped = query.float().view(num_seqs, num_queries, num_kv_heads, -1, head_dim).transpose(1, 2).flatten(2, 3)
    sums: list[torch.Tensor] = []
    size = max(1, _MAX_GATHERED // (num_seqs * cache.keys[0].numel()))
    for tables in torch.split(block_tables, size, dim=1):
        keys = cache.keys[tables]
        if cache.scales is not None:
            keys = dequantize_heads(keys, cache.scales[tables][..., 0].transpose(2, 3))
        scores = _capped(grouped @ keys.float().flatten(1, 2).permute(0, 2, 3, 1), options)
        scores = scores.view(num_seqs, num_kv_heads, num_queries, -1, tables.shape[1], block_size)
        first = sum(part.shape[-1] for part in sums) * block_size
        places = torch.arange(first, first + tables.shape[1] * block_size, device=scores.device)
        hidden = places.view(-1, block_size) >= contexts[:, None, :, None, None, None]
        sums.append(scores.masked_fill_(hidden, float("-inf")).logsumexp(-1))
    blocks = torch.cat(sums, -1)
    whole = blocks.logsumexp(-1, keepdim=True)
    if options.sinks is not None:
        whole = torch.logaddexp(whole, options.sinks.view(num_kv_heads, 1, -1, 1))
    return (blocks - whole).exp().amax((1, 3))


def bidirectional_span_attention(
    query: torch.Tensor, cache: LayerCache, block_table: torch.Tensor, num_before: int, options: AttentionOptions
) -> torch.Tensor:
    """Attend from all tokens of the run, whose keys and values are in the cache, in fp32.

    Args:
        query: Of the run's tokens.
        cache: Of the layer.
        block_table: Of the sequence; the run follows `num_before` tokens.
        num_before: Tokens of the sequence before the run.
        options: Of the layer; a token sees as far back as its window reaches, and forth to the end of the run.

    Shapes:
        query: `[num_tokens, num_heads, head_dim]`
        block_table: `[max_blocks]`
        result: `[num_tokens, num_heads, value_dim]`
    """
    size, end, window = cache.keys.shape[1], num_before + len(query), options.sliding_window
    first = 0 if window is None else max(0, num_before - window + 1) // size
    keys, values = (
        cached[: end - first * size] for cached in _read(cache, block_table[first : -(-end // size)].long())
    )
    places = torch.arange(num_before, end, device=query.device)[:, None]
    distance = places - torch.arange(first * size, end, device=query.device)
    hidden = torch.zeros_like(distance, dtype=torch.bool) if window is None else distance >= window
    return _attend(query, keys, values, hidden, options)[0].to(query.dtype)
