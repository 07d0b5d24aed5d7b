"""Attention of queries over a KV cache kept in blocks: reference, CPU and GPU kernels, and the choice among them."""

from kernels.paged_attention.dispatch import paged_attention
from kernels.paged_attention.expanded import expanded_attention, is_expansion_less

__all__ = ["expanded_attention", "is_expansion_less", "paged_attention"]
