"""Rotary position embedding of queries and keys, fused with qk-norm and with the write of keys and values."""

from kernels.rope_kv_write.dispatch import rope_kv_write
from kernels.rope_kv_write.reference import HeadNormWeights

__all__ = ["HeadNormWeights", "rope_kv_write"]
