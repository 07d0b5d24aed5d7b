"""Attention by latent vectors whose keys and values are made for a step, as prompts are multiplied with least work.

Over latent vectors a pair of tokens takes products of all their numbers, twice; over keys and values made of them a
fraction of that, once they are made. So it pays where each cached token meets many queries.
Source: DeepSeek-AI, DeepSeek-V2, arXiv 2405.04434, section 2.1.2.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from kernels.layer_cache import LayerCache
from kernels.paged_attention.dispatch import paged_attention
from kernels.paged_attention.options import AttentionOptions

# A step of fewer tokens saves less than its further launches take: two products, and keys put together.
FEWEST_EXPANDED = 256
# Sequences whose last blocks may be partly empty without making heads one group after another. Of more sequences the
# ends would take memory that no warm-up has taken: 255 short contexts in blocks of 64 tokens twice a step's of 8,192.
MOST_FREE_ENDS = 8


def is_expansion_less(
    plain_dim: int, latent_dim: int, value_dim: int, num_tokens: int, num_pairs: int, num_cached: int
) -> bool:
    """Return True where making keys and values takes fewer products than they save, by the sums of a step.

    They are made of `num_cached` tokens, all sequences' contexts. The products saved are those of each of `num_pairs`
    pairs of a query and a token that it sees, and those that take the step's own tokens to latent vectors and back: as
    many a token as making its key and value. So of new prompts they cost nothing. A chunk pays for the tokens before
    it where it has 170 of 512 numbers, 128 of a key and of a value. Each decode beside it adds its context, and next
    to no pairs. When a device has measured where the two meet, that factor belongs here.
    """
    saved = products_saved(plain_dim, latent_dim, value_dim, num_tokens, num_pairs, num_cached)
    return num_tokens >= FEWEST_EXPANDED and saved > 0


def products_saved(
    plain_dim: int, latent_dim: int, value_dim: int, num_tokens: int, num_pairs: int, num_cached: int
) -> int:
    """Return how many products of two numbers a head saves in a step; below zero it takes more."""
    made = (num_cached - num_tokens) * latent_dim * (plain_dim + value_dim)
    return num_pairs * (2 * latent_dim - plain_dim - value_dim) - made


class ExpandedBlocks(NamedTuple):
    """The blocks of a step's sequences end to end, the same for all layers.

    Attributes:
        blocks: `[num_blocks]` int32.
        tables: `[num_seqs, max_blocks]` int32, the places there of each sequence's blocks, as wide as the step's own
            tables. Behind a sequence's blocks are places of others, or none: no tokens that are read.
    """

    blocks: torch.Tensor
    tables: torch.Tensor

    @classmethod
    def of(
        cls, block_tables: torch.Tensor, context_lens: torch.Tensor, block_size: int, num_blocks: int
    ) -> ExpandedBlocks:
        """Gather `num_blocks` blocks: those of all contexts, each sequence's counted by themselves, or more."""
        num_seqs, capacity = block_tables.shape
        columns = torch.arange(capacity, dtype=torch.int32, device=block_tables.device)
        if num_seqs == 1:
            return cls(block_tables[0, :num_blocks], columns[None])
        counts = (context_lens + (block_size - 1)) // block_size
        ends = counts.cumsum(0, dtype=torch.int32)
        firsts = ends - counts
        places = torch.arange(num_blocks, dtype=torch.int32, device=block_tables.device)
        # Places behind all blocks, which graphs have, are of any block.
        owners = torch.searchsorted(ends, places, right=True).clamp_(max=num_seqs - 1)
        blocks = block_tables[owners, (places - firsts[owners]).clamp_(max=capacity - 1)]
        return cls(blocks, firsts[:, None] + columns)


def expanded_attention(
    query: torch.Tensor,
    cache: LayerCache,
    key_up: torch.Tensor,
    value_up: torch.Tensor,
    expanded: ExpandedBlocks,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    max_query_len: int,
    max_context_len: int,
    options: AttentionOptions,
) -> torch.Tensor:
    """Make the keys and values of all cached tokens of the step's sequences, and attend to them.

    They take no more memory than those of the step's own tokens would, and some ends of blocks, or those of one head:
    of a longer context, some heads are made after the others. The query has plain heads, the dimensions that turn
    behind the others. The cache has each token's latent vector and the dimensions of its key that turn; `key_up`
    makes the others of the vector, `value_up` the value. All else is as in `paged_attention`, which is called with
    strides and a table that are the same for any lengths and numbers of heads, so that one kernel of a GPU serves all
    steps.

    Shapes:
        query: `[num_tokens, num_heads, plain_dim + rotary_dim]`
        cache: keys of `[num_blocks, block_size, 1, latent_dim + rotary_dim]`
        key_up: `[num_heads, plain_dim, latent_dim]`
        value_up: `[num_heads, latent_dim, value_dim]`
        result: `[num_tokens, num_heads, value_dim]`
    """
    num_tokens, num_heads, _ = query.shape
    block_size = cache.keys.shape[1]
    kept = cache.keys.index_select(0, expanded.blocks).to(query.dtype)
    if cache.scales is not None:
        # Eight bits are exact in sixteen; the product is rounded once, in place.
        kept.mul_(cache.scales.index_select(0, expanded.blocks)[..., 0].transpose(1, 2)[..., None].float())
    kept = kept.flatten(0, 2)
    latents, turning = kept.split_with_sizes((key_up.shape[2], query.shape[2] - key_up.shape[1]), dim=1)
    # The ends of a few last blocks do not count, and groups of heads are equally large: each has launches of its own.
    ends = min(len(context_lens), MOST_FREE_ENDS) * block_size
    most = max(1, num_heads * (num_tokens + ends) // max(1, len(latents)))
    at_once = -(-num_heads // -(-num_heads // min(most, num_heads)))
    lengths = (query_starts, context_lens, max_query_len, max_context_len)

    def attend(heads: slice) -> torch.Tensor:
        own = latents.expand(len(key_up[heads]), -1, -1)
        plain = torch.bmm(own, key_up[heads].transpose(1, 2))
        keys = torch.cat((plain, turning.expand(len(own), -1, -1)), dim=2)
        made = LayerCache(_in_blocks(keys, block_size), _in_blocks(torch.bmm(own, value_up[heads]), block_size))
        return paged_attention(query[:, heads], made, expanded.tables, *lengths, options, in_chunks=True)

    if at_once == num_heads:
        return attend(slice(num_heads))
    result = query.new_empty(num_tokens, num_heads, value_up.shape[2])
    for first in range(0, num_heads, at_once):
        heads = slice(first, first + at_once)
        result[:, heads] = attend(heads)
    return result


def _in_blocks(heads: torch.Tensor, block_size: int) -> torch.Tensor:
    """Return what lies head by head, `[num_heads, num_tokens, dim]`, as a cache: a strided view."""
    return heads.view(len(heads), -1, block_size, heads.shape[2]).permute(1, 2, 0, 3)
