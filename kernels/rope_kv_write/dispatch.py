"""Chooses the implementation of rotation and KV write for the tensors at hand."""

from __future__ import annotations

import torch

from kernels.cpu_library import cpu_library
from kernels.gpu_config import is_triton_installed
from kernels.rope_kv_write.cpu import can_run, rope_kv_write_cpu
from kernels.rope_kv_write.reference import HeadNormWeights, rope_kv_write_reference


def rope_kv_write(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor | None,
    key_cache: torch.Tensor | None,
    value_cache: torch.Tensor | None,
    slot_mapping: torch.Tensor,
    head_norm: HeadNormWeights | None = None,
    kv_scales: torch.Tensor | None = None,
    values: torch.Tensor | None = None,
    first_rotated: int = 0,
    is_interleaved: bool = False,
) -> torch.Tensor:
    """Rotate the query heads in place, and write rotated keys, and values, into their slots of the cache.

    Of the dimensions that are rotated, `i` is paired with `i + rotated_dim / 2`, or `2 * i` with `2 * i + 1`; the other
    dimensions of a head stay. Everything is computed in fp32 and rounded once, or quantised as `kernels.quantized_kv`
    says.
    Source: Su et al., arXiv 2104.09864, equation 34.

    Args:
        qkv: Per token the query heads, then the key heads, then the value heads: those that there are. May be strided
            in its first dimension. Its query heads are overwritten.
        positions: Of the tokens, each below the length of the table.
        cos_sin: Per position the cosines, then the sines. Contiguous. None rotates nothing.
        key_cache: Written at the slots; converted to its type. May be strided in all but its last dimension, on CPUs in
            all. None where there are neither keys nor values, as in a layer that attends to the cache of another.
        value_cache: Likewise, but for its last dimension; None where there are no values, as where they are a part of
            the keys.
        slot_mapping: `block * block_size + offset` of each token, no slot twice; -1, for padding, is not written.
        head_norm: Normalises query and key heads before the rotation; None leaves them.
        kv_scales: Of a cache in eight bits, written at the slots; None of any other. Contiguous. Without values the
            scale of a value is that of the key.
        values: The value heads where they are not in `qkv`, as those of a size of their own cannot be; may be strided
            in its first dimension.
        first_rotated: The first dimension of a head that is rotated.
        is_interleaved: Neighbouring dimensions are paired.

    Shapes:
        qkv: `[num_tokens, num_heads + 2 * num_kv_heads, head_dim]`, or fewer heads as said above
        positions: `[num_tokens]` int32 or int64
        cos_sin: `[max_positions, rotated_dim]`
        key_cache: `[num_blocks, block_size, num_kv_heads, head_dim]`
        value_cache: `[num_blocks, block_size, num_kv_heads, value_dim]`
        slot_mapping: `[num_tokens]` int64
        kv_scales: `[num_blocks, num_kv_heads, block_size, 2]` float16
        values: `[num_tokens, num_kv_heads, value_dim]`
        result: `[num_tokens, num_heads, head_dim]`, the query heads, a view of `qkv`
    """
    arguments = (qkv, positions, cos_sin, key_cache, value_cache, slot_mapping, head_norm)
    pairing = (values, first_rotated, is_interleaved)
    if qkv.is_cuda and is_triton_installed():
        from kernels.rope_kv_write.triton_kernel import rope_kv_write_triton

        return rope_kv_write_triton(*arguments, kv_scales, *pairing)
    can_compile = can_run(qkv, positions, cos_sin, key_cache, value_cache, head_norm, values)
    if can_compile and (library := cpu_library()) is not None:
        return rope_kv_write_cpu(library, *arguments, kv_scales, *pairing)
    return rope_kv_write_reference(*arguments, kv_scales, *pairing)
