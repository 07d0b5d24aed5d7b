"""Rotation, head normalisation and KV write in plain torch: the oracle of the kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.layer_cache import quantize_heads


@dataclass(frozen=True, slots=True)
class HeadNormWeights:
    """The weights of qk-norm, `[head_dim]` each: RMS normalisation of every query and key head before the rotation."""

    query: torch.Tensor
    key: torch.Tensor
    eps: float


def rope_kv_write_reference(
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
    """Do what `kernels.rope_kv_write.rope_kv_write` promises, in fp32, rounded once."""
    num_kv_heads = 0 if key_cache is None else key_cache.shape[2]
    if value_cache is not None and values is None:
        qkv, values = qkv[:, :-num_kv_heads], qkv[:, -num_kv_heads:]
    num_heads = qkv.shape[1] - num_kv_heads
    table = None if cos_sin is None else cos_sin[positions].float().unsqueeze(1)
    query, key = qkv[:, :num_heads], qkv[:, num_heads:]
    wide_query, wide_key = query.float(), key.float()
    if head_norm is not None:
        wide_query = _normalise(query, head_norm.query, head_norm.eps)
        wide_key = _normalise(key, head_norm.key, head_norm.eps)
    if key_cache is not None:
        is_written = slot_mapping >= 0
        slots = slot_mapping[is_written]
        rotated_key = _rotate(wide_key, table, first_rotated, is_interleaved)
        _store(rotated_key[is_written], slots, key_cache, None if kv_scales is None else kv_scales[..., 0])
        if value_cache is not None and values is not None:
            _store(values[is_written], slots, value_cache, None if kv_scales is None else kv_scales[..., 1])
        elif kv_scales is not None:
            blocks, offsets = slots // key_cache.shape[1], slots % key_cache.shape[1]
            kv_scales[blocks, :, offsets, 1] = kv_scales[blocks, :, offsets, 0]
    query.copy_(_rotate(wide_query, table, first_rotated, is_interleaved))
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


def _rotate(heads: torch.Tensor, table: torch.Tensor | None, start: int, is_interleaved: bool) -> torch.Tensor:
    if table is None:
        return heads
    cos, sin = table.chunk(2, dim=-1)
    half = cos.shape[-1]
    end = start + 2 * half
    turned = heads[..., start:end]
    first, second = (turned[..., ::2], turned[..., 1::2]) if is_interleaved else turned.chunk(2, dim=-1)
    rotated = (first * cos - second * sin, second * cos + first * sin)
    joined = torch.stack(rotated, dim=-1).flatten(-2) if is_interleaved else torch.cat(rotated, dim=-1)
    return torch.cat((heads[..., :start], joined, heads[..., end:]), dim=-1)
