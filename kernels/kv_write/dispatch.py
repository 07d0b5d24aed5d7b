"""Chooses the implementation of the KV write for the tensors at hand."""

from __future__ import annotations

import torch

from kernels.cpu_library import cpu_library
from kernels.kv_write.cpu import can_run, write_kv_cpu
from kernels.kv_write.reference import write_kv_reference


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Copy each token's key and value into its slot of the cache, in place.

    Args:
        key: May be strided in its first dimension; converted to the cache's dtype.
        value: Likewise.
        key_cache: Contiguous.
        value_cache: Contiguous.
        slot_mapping: `block * block_size + offset` of each token; no slot twice.

    Shapes:
        key, value: `[num_tokens, num_kv_heads, head_dim]`
        key_cache, value_cache: `[num_blocks, block_size, num_kv_heads, head_dim]`, contiguous
        slot_mapping: `[num_tokens]` int64
    """
    if can_run(key, value, key_cache) and (library := cpu_library()) is not None:
        write_kv_cpu(library, key, value, key_cache, value_cache, slot_mapping)
        return
    write_kv_reference(key, value, key_cache, value_cache, slot_mapping)
