"""Writing the keys and values of a step's tokens into the KV cache: reference, CPU kernel, and the choice."""

from kernels.kv_write.dispatch import write_kv

__all__ = ["write_kv"]
