"""Attention of queries over a KV cache kept in blocks: reference, CPU and GPU kernels, and the choice among them."""

from kernels.paged_attention.dispatch import paged_attention

__all__ = ["paged_attention"]
