"""Rotations beyond the plain one, heads of keys and values that differ, and what an implementation makes of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kernels.layer_cache import LayerCache, is_quantized
from kernels.rope_kv_write import HeadNormWeights
from kernels.rope_kv_write.reference import rope_kv_write_reference
from tests.kernels.layer_caches import assert_caches_close, poisoned_cache
from tests.kernels.tolerances import assert_close

Write = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Variant:
    """A rotation of `rotated_dim` dimensions from `first` on, of heads of keys and of values."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotated_dim: int
    first: int = 0
    is_interleaved: bool = False
    value_dim: int | None = None
    has_keys: bool = True
    has_values: bool = True
    has_norm: bool = False
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype = torch.float32


VARIANTS = {
    "neighbours": Variant(4, 2, 24, 24, is_interleaved=True),
    "some neighbours": Variant(5, 1, 40, 12, is_interleaved=True, has_norm=True),
    "last dimensions": Variant(3, 3, 48, 16, first=32, dtype=torch.float16),
    "last neighbours": Variant(3, 1, 48, 16, first=32, is_interleaved=True, cache_dtype=torch.int8),
    "nothing": Variant(4, 2, 24, 0, has_norm=True),
    "nothing in eight bits": Variant(4, 2, 24, 0, cache_dtype=torch.float8_e4m3fn),
    "smaller values": Variant(4, 2, 24, 24, value_dim=16, dtype=torch.float16),
    "larger values": Variant(4, 2, 24, 8, value_dim=40, cache_dtype=torch.int8),
    "values of more heads than a program takes": Variant(17, 17, 24, 24, value_dim=16),
    "keys that hold the values": Variant(6, 1, 72, 8, first=64, has_values=False),
    "keys in int8 that hold the values": Variant(6, 1, 72, 8, first=64, has_values=False, cache_dtype=torch.int8),
    "large keys": Variant(2, 1, 576, 64, first=512, has_values=False),
    "keys alone": Variant(0, 1, 72, 8, first=64, has_values=False),
    "keys alone in int8": Variant(0, 1, 72, 8, first=64, has_values=False, cache_dtype=torch.int8, is_interleaved=True),
    "queries alone": Variant(3, 1, 24, 8, first=16, is_interleaved=True, has_keys=False, has_values=False),
    "no keys": Variant(4, 2, 24, 24, has_keys=False, has_values=False, has_norm=True),
}


def run(write: Write, variant: Variant, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Write five tokens, the third of them padding, into strided caches of NaN; return queries and caches."""
    generator = torch.Generator().manual_seed(variant.head_dim)

    def rand(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator).to(device, variant.dtype)

    num_kv_heads, value_dim = variant.num_kv_heads, variant.value_dim or variant.head_dim
    num_heads = variant.num_heads + num_kv_heads * (variant.has_keys + (variant.has_values and not variant.value_dim))
    qkv = rand(5, num_heads + 2, variant.head_dim)[:, 1:-1]
    angles = torch.randn(50, variant.rotated_dim // 2, generator=generator)
    table = torch.cat((angles.cos(), angles.sin()), 1).to(device) if variant.rotated_dim else None
    whole = poisoned_cache(
        4, 3, num_kv_heads + 1, max(variant.head_dim, value_dim) + 8, variant.cache_dtype, torch.device("cpu")
    )
    keys = whole.keys.to(device)[:, :, :num_kv_heads, : variant.head_dim]
    values = whole.values.to(device)[:, :, :num_kv_heads, :value_dim]
    scales = None
    if is_quantized(variant.cache_dtype):
        scales = torch.full((4, num_kv_heads, 3, 2), float("nan"), dtype=torch.float16, device=device)
    norm = HeadNormWeights(rand(variant.head_dim), rand(variant.head_dim), 1e-5) if variant.has_norm else None
    query = write(
        qkv,
        torch.tensor([0, 49, 7, 8, 3], device=device),
        table,
        keys if variant.has_keys else None,
        values if variant.has_values else None,
        torch.tensor([3, 0, -1, 11, 5], device=device),
        norm,
        scales,
        rand(5, num_kv_heads, value_dim) if variant.value_dim else None,
        variant.first,
        variant.is_interleaved,
    )
    assert query.shape == (5, variant.num_heads, variant.head_dim)
    return tuple(part.cpu() for part in (query, keys, values, *([] if scales is None else [scales])))


def check(write: Write, variant: Variant, device: torch.device) -> None:
    query, keys, values, *scales = run(write, variant, device)
    expected, their_keys, their_values, *their_scales = run(rope_kv_write_reference, variant, torch.device("cpu"))
    assert_close(query, expected)
    written = [(keys, their_keys, 0)] if variant.has_keys else []
    for mine, theirs, kind in written + ([(values, their_values, 1)] if variant.has_values else []):
        pair = [
            LayerCache(cache, cache, part[0][..., [kind, kind]] if part else None)
            for cache, part in ((mine, scales), (theirs, their_scales))
        ]
        assert_caches_close(*pair)
    if scales and not variant.has_values:
        assert torch.equal(scales[0][..., 0].isnan(), scales[0][..., 1].isnan())
        torch.testing.assert_close(scales[0], their_scales[0], rtol=1e-3, atol=0, equal_nan=True)
