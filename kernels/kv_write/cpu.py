"""KV write by the compiled CPU kernel (`cpu.cpp`)."""

from __future__ import annotations

import torch

from kernels.cpu_library import DTYPE_NUMBERS, CpuLibrary


def can_run(key: torch.Tensor, value: torch.Tensor, key_cache: torch.Tensor) -> bool:
    """Return True where the kernel supports these types and layouts: each token's heads lie in one piece."""
    head_dim = key.shape[2]
    return (
        key.is_cpu
        and key.dtype is value.dtype
        and key.dtype in DTYPE_NUMBERS
        and key_cache.dtype in DTYPE_NUMBERS
        and key.stride(1) == value.stride(1) == head_dim
        and key.stride(2) == value.stride(2) == 1
    )


def write_kv_cpu(
    library: CpuLibrary,
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Do what `kernels.kv_write.write_kv` promises."""
    num_tokens, num_kv_heads, head_dim = key.shape
    library.kv_write(
        key.data_ptr(),
        value.data_ptr(),
        key_cache.data_ptr(),
        value_cache.data_ptr(),
        slot_mapping.data_ptr(),
        key.stride(0),
        value.stride(0),
        num_tokens,
        num_kv_heads * head_dim,
        DTYPE_NUMBERS[key.dtype],
        DTYPE_NUMBERS[key_cache.dtype],
    )
