"""Rotation, head normalisation and KV write in plain torch: the oracle of the kernel, and what runs without one."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.quantized_kv import quantize_heads


@dataclass(frozen=True, slots=True)
class HeadNormWeights:
    """The weights of qk-norm, `[head_dim]` each: RMS normalisation of every query and key head before the rotation."""

    query: torch.Tensor
    key: torch.Tensor
    eps: float


def rope_kv_write_reference(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    head_norm: HeadNormWeights | None = None,
    kv_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Do what `kernels.rope_kv_write.rope_kv_write` promises, in fp32, rounded once."""
    num_kv_heads = key_cache.shape[2]
    num_heads = qkv.shape[1] - 2 * num_kv_heads
    query, key, value = qkv[:, :num_heads], qkv[:, num_heads:-num_kv_heads], qkv[:, -num_kv_heads:]
    cos, sin = cos_sin[positions].float().unsqueeze(1).chunk(2, dim=-1)
    is_written = slot_mapping >= 0
    slots = slot_mapping[is_written]
    rotated_key = _rotate(_normalise(key, head_norm.key, head_norm.eps) if head_norm else key.float(), cos, sin)
    for kind, (cache, heads) in enumerate(((key_cache, rotated_key), (value_cache, value))):
        _store(heads[is_written], slots, cache, None if kv_scales is None else kv_scales[..., kind])
    query.copy_(_rotate(_normalise(query, head_norm.query, head_norm.eps) if head_norm else query.float(), cos, sin))
    return query


def _store(heads: torch.Tensor, slots: torch.Tensor, cache: torch.Tensor, scales: torch.Tensor | None) -> None:
    blocks, offsets = slots // cache.shape[1], slots % cache.shape[1]
    if scales is None:
        cache[blocks, offsets] = heads.to(cache.dtype)
    else:
        cache[blocks, offsets], scales[blocks, :, offsets] = quantize_heads(heads, cache.dtype)


def _normalise(heads: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    normalised: torch.Tensor = torch.rms_norm(heads.float(), weight.shape, weight.float(), eps)
    return normalised


def _rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = cos.shape[-1]
    first, second, rest = heads[..., :half], heads[..., half : 2 * half], heads[..., 2 * half :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)
