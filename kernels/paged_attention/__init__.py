"""Attention of queries over a KV cache kept in blocks: reference, CPU kernel, and the choice between them."""

from kernels.paged_attention.dispatch import paged_attention

__all__ = ["paged_attention"]
