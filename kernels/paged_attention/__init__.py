"""Attention of queries over a KV cache kept in blocks: reference, CPU and GPU kernels, and the choice among them."""

from kernels.paged_attention.dispatch import paged_attention
from kernels.paged_attention.expanded import (
    MOST_FREE_ENDS,
    ExpandedBlocks,
    expanded_attention,
    is_expansion_less,
    products_saved,
)
from kernels.paged_attention.options import AttentionOptions, Partial
from kernels.paged_attention.reference import block_attention, merge_partials

__all__ = [
    "MOST_FREE_ENDS",
    "AttentionOptions",
    "ExpandedBlocks",
    "Partial",
    "block_attention",
    "expanded_attention",
    "is_expansion_less",
    "merge_partials",
    "paged_attention",
    "products_saved",
]
