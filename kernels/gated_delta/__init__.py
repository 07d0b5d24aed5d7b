"""Gated delta rule: attention that keeps a matrix a head instead of keys and values."""

from kernels.gated_delta.dispatch import DeltaSizes, DeltaWeights, gated_delta

__all__ = ["DeltaSizes", "DeltaWeights", "gated_delta"]
