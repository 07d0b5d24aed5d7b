"""Chooses the implementation of rotation and KV write; on CPUs the compiled kernel."""

from __future__ import annotations

import ctypes

import torch

from kernels.cpu_library import CACHE_DTYPE_NUMBERS, DTYPE_NUMBERS, CpuLibrary, cpu_library
from kernels.cpu_structures import RotationStructure, StridesStructure, address_of, strides_of
from kernels.gpu_config import is_triton_installed
from kernels.rope_kv_write.reference import HeadNormWeights, rope_kv_write_reference

MAX_HEAD_DIM = 576


def can_run(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor | None,
    key_cache: torch.Tensor | None,
    value_cache: torch.Tensor | None,
    head_norm: HeadNormWeights | None,
    values: torch.Tensor | None = None,
) -> bool:
    """Return True where the kernel supports these types and layouts: each token's heads lie in one piece."""
    caches = [cache for cache in (key_cache, value_cache) if cache is not None]
    return (
        qkv.is_cpu
        and qkv.dtype in DTYPE_NUMBERS
        and all(cache.dtype in CACHE_DTYPE_NUMBERS and cache.shape[3] <= MAX_HEAD_DIM for cache in caches)
        and (value_cache is None or value_cache.stride(3) == 1)
        and positions.dtype is torch.int64
        and (cos_sin is None or cos_sin.dtype is torch.float32)
        and qkv.shape[2] <= MAX_HEAD_DIM
        and is_whole(qkv)
        and (values is None or (is_whole(values) and values.dtype is qkv.dtype))
        and (head_norm is None or head_norm.query.dtype is head_norm.key.dtype is qkv.dtype)
    )


def is_whole(heads: torch.Tensor) -> bool:
    """Return True where the heads of each token lie side by side."""
    return heads.stride(1) == heads.shape[2] and heads.stride(2) == 1


def rope_kv_write_cpu(
    library: CpuLibrary,
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
    """Do what `kernels.rope_kv_write.rope_kv_write` promises."""
    num_tokens, num_all_heads, head_dim = qkv.shape
    num_kv_heads = 0 if key_cache is None else key_cache.shape[2]
    has_values = value_cache is not None and values is None
    num_heads = num_all_heads - (2 if has_values else 1) * num_kv_heads
    none = StridesStructure()
    norm = (None, None, 0.0) if head_norm is None else (head_norm.query, head_norm.key, head_norm.eps)
    strides = [none if cache is None else strides_of(cache) for cache in (key_cache, value_cache)]
    arguments = RotationStructure(
        *(qkv.data_ptr(), address_of(values), positions.data_ptr(), address_of(cos_sin)),
        *(address_of(key_cache), address_of(value_cache), address_of(kv_scales), slot_mapping.data_ptr()),
        *(address_of(norm[0]), address_of(norm[1]), qkv.stride(0), 0 if values is None else values.stride(0)),
        *(*strides, num_heads, num_kv_heads, head_dim, 0 if cos_sin is None else cos_sin.shape[1]),
        *(first_rotated, is_interleaved, 0 if value_cache is None else value_cache.shape[3], num_tokens),
        *(1 if key_cache is None else key_cache.shape[1], norm[2]),
    )
    cache_dtype = qkv.dtype if key_cache is None else key_cache.dtype
    dtypes = DTYPE_NUMBERS[qkv.dtype], CACHE_DTYPE_NUMBERS[cache_dtype]
    library.rope_kv_write(ctypes.byref(arguments), *dtypes, torch.get_num_threads())
    return qkv[:, :num_heads]


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
    dimensions of a head stay. Everything is computed in fp32 and rounded once, or quantised as `kernels.layer_cache`
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
