"""The activation of a gated feed-forward block: SiLU of one half of the features times the other half."""

from kernels.silu_mul.dispatch import silu_mul

__all__ = ["silu_mul"]
