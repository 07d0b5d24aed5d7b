"""Paged attention in plain torch, of all tokens or of parts: the oracle of the kernels, and what runs without them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.layer_cache import EVERY_TOKEN, CachedTokens, LayerCache, dequantize_heads


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


_MAX_GATHERED = 1 << 23
"""Numbers of keys that `block_attention` gathers at once, 32 MiB in float32."""


def paged_attention_reference(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    max_query_len: int,
    max_context_len: int,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    kv_scales: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    chunk_size: int | None = None,
    partial: Partial | None = None,
) -> torch.Tensor:
    """Compute what `kernels.paged_attention.paged_attention` promises, one sequence at a time, in fp32.

    An empty context, which padding rows of a batch have, yields zeros.
    """
    tokens, dtype = (EVERY_TOKEN, query.dtype) if partial is None else (partial.tokens, torch.float32)
    result = torch.zeros(*query.shape[:2], value_cache.shape[3], dtype=dtype, device=query.device)
    if partial is not None:
        partial.lse.fill_(float("-inf"))
    starts, lengths = query_starts.tolist(), context_lens.tolist()
    block_size = key_cache.shape[1]
    for sequence, context_len in enumerate(lengths):
        rows = slice(starts[sequence], starts[sequence + 1])
        num_cached = len(range(tokens.first, context_len, tokens.step))
        blocks = block_tables[sequence, : -(-num_cached // block_size)].long()
        keys, values = key_cache[blocks], value_cache[blocks]
        if kv_scales is not None:
            key_scales, value_scales = kv_scales[blocks].transpose(1, 2).unbind(-1)
            keys, values = dequantize_heads(keys, key_scales), dequantize_heads(values, value_scales)
        keys, values = (cached.flatten(0, 1)[:num_cached] for cached in (keys, values))
        if num_cached > 0 and starts[sequence] < starts[sequence + 1]:
            hidden = _hidden(rows.stop - rows.start, context_len, sliding_window, chunk_size, tokens, query.device)
            result[rows], lse = _attend(query[rows], keys, values, hidden, scale, soft_cap, sinks)
            if partial is not None:
                partial.lse[rows] = lse
    return result


def _hidden(
    num_queries: int,
    context_len: int,
    sliding_window: int | None,
    chunk_size: int | None,
    tokens: CachedTokens,
    device: torch.device,
) -> torch.Tensor:
    slots = torch.arange(context_len - num_queries, context_len, device=device)[:, None]
    distance = slots - torch.arange(tokens.first, context_len, tokens.step, device=device)
    hidden = distance < 0
    if sliding_window is not None:
        hidden |= distance >= sliding_window
    if chunk_size is not None:
        hidden |= distance > slots % chunk_size
    return hidden


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    hidden: torch.Tensor,
    scale: float,
    soft_cap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attend from the last `len(query)` tokens of a sequence to those of its `len(keys)` tokens that are not hidden."""
    return _attend(query, keys, values, hidden, scale, soft_cap, sinks)[0].to(query.dtype)


def _attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    hidden: torch.Tensor,
    scale: float,
    soft_cap: float | None,
    sinks: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Do the same in float32, and return the logs of the sums of exponentials too."""
    num_queries, _, head_dim = query.shape
    context_len, num_kv_heads, _ = keys.shape
    # [kv_head, group * num_queries, head_dim]: the query heads that share a KV head are one matrix.
    grouped = query.float().view(num_queries, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3).flatten(1, 2)
    scores = grouped @ keys.float().permute(1, 2, 0) * scale
    if soft_cap is not None:
        scores = torch.tanh(scores / soft_cap) * soft_cap
    scores = scores.view(num_kv_heads, -1, num_queries, context_len).masked_fill_(hidden, float("-inf"))
    if sinks is not None:
        columns = sinks.float().view(num_kv_heads, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, columns), dim=-1)
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - lse.clamp(min=torch.finfo(lse.dtype).min)[..., None])[..., :context_len]
    attended = weights.flatten(1, 2) @ values.float().transpose(0, 1)
    heads = attended.view(num_kv_heads, -1, num_queries, values.shape[2])
    return heads.permute(2, 0, 1, 3).flatten(1, 2), lse.flatten(0, 1).T


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

    Some blocks after the others, so that long sequences take no more memory than a few blocks' keys.

    Shapes:
        query: `[num_seqs, num_queries, num_heads, head_dim]`
        key_cache, kv_scales, sinks: as for `kernels.paged_attention.paged_attention`
        block_tables: `[num_seqs, num_blocks]` int64
        contexts: `[num_seqs, num_queries]` int64, tokens that each query sees: the first ones
        result: `[num_seqs, num_queries, num_blocks]` float32
    """
    num_seqs, num_queries = query.shape[:2]
    block_size, num_kv_heads, head_dim = key_cache.shape[1:]
    # [num_seqs, num_kv_heads, num_queries * group, head_dim] by [num_seqs, num_kv_heads, head_dim, num_tokens].
    grouped = query.float().view(num_seqs, num_queries, num_kv_heads, -1, head_dim).transpose(1, 2).flatten(2, 3)
    sums: list[torch.Tensor] = []
    size = max(1, _MAX_GATHERED // (num_seqs * key_cache[0].numel()))
    for tables in torch.split(block_tables, size, dim=1):
        keys = key_cache[tables]
        if kv_scales is not None:
            keys = dequantize_heads(keys, kv_scales[tables][..., 0].transpose(2, 3))
        scores = grouped @ keys.float().flatten(1, 2).permute(0, 2, 3, 1) * scale
        if soft_cap is not None:
            scores = torch.tanh(scores / soft_cap) * soft_cap
        scores = scores.view(num_seqs, num_kv_heads, num_queries, -1, tables.shape[1], block_size)
        first = sum(part.shape[-1] for part in sums) * block_size
        places = torch.arange(first, first + tables.shape[1] * block_size, device=scores.device)
        hidden = places.view(-1, block_size) >= contexts[:, None, :, None, None, None]
        sums.append(scores.masked_fill_(hidden, float("-inf")).logsumexp(-1))
    blocks = torch.cat(sums, -1)
    whole = blocks.logsumexp(-1, keepdim=True)
    if sinks is not None:
        whole = torch.logaddexp(whole, sinks.float().view(num_kv_heads, 1, -1, 1))
    return (blocks - whole).exp().amax((1, 3))


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
