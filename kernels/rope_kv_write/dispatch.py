"""Chooses the implementation of rotation and KV write for the tensors at hand."""

from __future__ import annotations

import torch

from kernels.cpu_library import cpu_library
from kernels.gpu_config import gpu_of, is_triton_installed
from kernels.rope_kv_write.cpu import can_run, rope_kv_write_cpu
from kernels.rope_kv_write.reference import HeadNormWeights, rope_kv_write_reference


def rope_kv_write(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    head_norm: HeadNormWeights | None = None,
    kv_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rotate the query heads in place, and write rotated keys, and values, into their slots of the cache.

    Dimension `i` of a head is paired with dimension `i + rotated_dim / 2`; dimensions from `rotated_dim` on stay.
    Everything is computed in fp32 and rounded once, or quantised as `kernels.quantized_kv` says.
    Source: Su et al., arXiv 2104.09864, equation 34.

    Args:
        qkv: Per token the query heads, then the key heads, then the value heads. May be strided in its first
            dimension. Its query heads are overwritten.
        positions: Of the tokens, each below the length of the table.
        cos_sin: Per position the cosines, then the sines. Contiguous, as are all tensors below.
        key_cache: Written at the slots; converted to its type.
        value_cache: Likewise.
        slot_mapping: `block * block_size + offset` of each token, no slot twice; -1, for padding, is not written.
        head_norm: Normalises query and key heads before the rotation; None leaves them.
        kv_scales: Of a cache in eight bits, written at the slots; None of any other.

    Shapes:
        qkv: `[num_tokens, num_heads + 2 * num_kv_heads, head_dim]`
        positions: `[num_tokens]` int32 or int64
        cos_sin: `[max_positions, rotated_dim]`
        key_cache, value_cache: `[num_blocks, block_size, num_kv_heads, head_dim]`
        slot_mapping: `[num_tokens]` int64
        kv_scales: `[num_blocks, num_kv_heads, block_size, 2]` float16
        result: `[num_tokens, num_heads, head_dim]`, the query heads, a view of `qkv`
    """
    if qkv.is_cuda and is_triton_installed():
        from kernels.rope_kv_write.triton_kernel import rope_kv_write_triton

        gpu = gpu_of(qkv.device)
        return rope_kv_write_triton(
            qkv, positions, cos_sin, key_cache, value_cache, slot_mapping, head_norm, gpu, kv_scales
        )
    if can_run(qkv, positions, cos_sin, key_cache, head_norm) and (library := cpu_library()) is not None:
        return rope_kv_write_cpu(
            library, qkv, positions, cos_sin, key_cache, value_cache, slot_mapping, head_norm, kv_scales
        )
    return rope_kv_write_reference(qkv, positions, cos_sin, key_cache, value_cache, slot_mapping, head_norm, kv_scales)
