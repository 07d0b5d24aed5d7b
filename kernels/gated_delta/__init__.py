"""Gated delta rule: attention that keeps a matrix a head instead of keys and values."""

from kernels.gated_delta.dispatch import gated_delta
from kernels.gated_delta.reference import DeltaSizes, DeltaWeights

__all__ = ["DeltaSizes", "DeltaWeights", "gated_delta"]
