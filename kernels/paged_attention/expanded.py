"""Attention by latent vectors whose keys and values are made for a step, as prompts are multiplied with least work.

Over latent vectors a pair of tokens takes products of all their numbers, twice; over keys and values made of them a
fraction of that, once they are made. So it pays where each cached token meets many queries.
Source: DeepSeek-AI, DeepSeek-V2, arXiv 2405.04434, section 2.1.2.
"""

from __future__ import annotations

import torch

from kernels.layer_cache import LayerCache, dequantize_heads
from kernels.paged_attention.dispatch import paged_attention
from kernels.paged_attention.options import AttentionOptions


def is_expansion_less(plain_dim: int, latent_dim: int, value_dim: int, num_pairs: int, num_cached: int) -> bool:
    """Return True where making keys and values takes fewer products than they save, by the sums of a step.

    They are made of `num_cached` tokens, all sequences' contexts, and save at each of `num_pairs` pairs of a query and
    a token that it sees: with 512 numbers, 128 of a key and of a value, from some 340 tokens of a new prompt on, and
    from 170 behind a long context, alone. Each decode beside it adds its context, and next to no pairs.
    When a device has measured where the two meet, that factor belongs here.
    """
    saved = num_pairs * (2 * latent_dim - plain_dim - value_dim)
    return saved > num_cached * latent_dim * (plain_dim + value_dim)


def expanded_attention(
    query: torch.Tensor,
    cache: LayerCache,
    key_up: torch.Tensor,
    value_up: torch.Tensor,
    block_tables: torch.Tensor,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    max_query_len: int,
    max_context_len: int,
    options: AttentionOptions,
    *,
    num_blocks: int,
) -> torch.Tensor:
    """Make the keys and values of all cached tokens of the step's sequences, and attend to them.

    They take no more memory than those of the step's own tokens would, or those of one head: of a longer context, some
    heads are made after the others. The query has plain heads, the dimensions that turn behind the others. The cache
    has each token's latent vector and the dimensions of its key that turn; `key_up` makes the others of the vector,
    `value_up` the value. `num_blocks` is how many blocks the sequences' contexts lie in, each counted by itself. All
    else is as in `paged_attention`, which is called with strides and a table that are the same for any lengths and
    numbers of heads, so that one kernel of a GPU serves all steps.

    Shapes:
        query: `[num_tokens, num_heads, plain_dim + rotary_dim]`
        cache: keys of `[num_blocks, block_size, 1, latent_dim + rotary_dim]`
        key_up: `[num_heads, plain_dim, latent_dim]`
        value_up: `[num_heads, latent_dim, value_dim]`
        result: `[num_tokens, num_heads, value_dim]`
    """
    num_tokens, num_heads, _ = query.shape
    block_size = cache.keys.shape[1]
    blocks, tables = _gathered(block_tables, context_lens, block_size, num_blocks)
    kept = cache.keys.index_select(0, blocks)
    if cache.scales is not None:
        kept = dequantize_heads(kept, cache.scales.index_select(0, blocks)[..., 0].transpose(1, 2))
    kept = kept.to(query.dtype).flatten(0, 2)
    latents, turning = kept.split_with_sizes((key_up.shape[2], query.shape[2] - key_up.shape[1]), dim=1)
    result = query.new_empty(num_tokens, num_heads, value_up.shape[2])
    at_once = max(1, num_heads * num_tokens // max(1, len(latents)))
    for first in range(0, num_heads, at_once):
        heads = slice(first, first + at_once)
        own = latents.expand(len(key_up[heads]), -1, -1)
        plain = torch.bmm(own, key_up[heads].transpose(1, 2))
        keys = torch.cat((plain, turning.expand(len(own), -1, -1)), dim=2)
        values = torch.bmm(own, value_up[heads])
        result[:, heads] = paged_attention(
            query[:, heads],
            LayerCache(_in_blocks(keys, block_size), _in_blocks(values, block_size)),
            tables,
            query_starts,
            context_lens,
            max_query_len,
            max_context_len,
            options,
            in_chunks=True,
        )
    return result


def _gathered(
    block_tables: torch.Tensor, context_lens: torch.Tensor, block_size: int, num_blocks: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return all sequences' blocks end to end, and the table of their places there, as wide as the step's own.

    Behind a sequence's blocks it has places of others, or none: no tokens that are read.
    """
    num_seqs, capacity = block_tables.shape
    columns = torch.arange(capacity, dtype=torch.int32, device=block_tables.device)
    if num_seqs == 1:
        return block_tables[0, :num_blocks], columns[None]
    counts = (context_lens + (block_size - 1)) // block_size
    ends = counts.cumsum(0, dtype=torch.int32)
    firsts = ends - counts
    places = torch.arange(num_blocks, dtype=torch.int32, device=block_tables.device)
    owners = torch.searchsorted(ends, places, right=True)
    return block_tables[owners, places - firsts[owners]], firsts[:, None] + columns


def _in_blocks(heads: torch.Tensor, block_size: int) -> torch.Tensor:
    """Return what lies head by head, `[num_heads, num_tokens, dim]`, as a cache: a strided view."""
    return heads.view(len(heads), -1, block_size, heads.shape[2]).permute(1, 2, 0, 3)
