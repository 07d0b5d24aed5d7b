"""Forbidding tokens that a grammar does not allow: reference, Triton kernel, and the choice between them."""

from kernels.logits_bitmask.dispatch import forbid_tokens

__all__ = ["forbid_tokens"]
