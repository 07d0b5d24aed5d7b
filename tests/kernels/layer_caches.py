"""Caches that show where nothing was written, and how close two of them must be."""

from __future__ import annotations

import torch

from kernels.layer_cache import CacheShape, LayerCache, allocate_caches, dequantize_heads, is_quantized
from tests.kernels.tolerances import assert_close

EIGHT_BITS = [torch.int8, torch.float8_e4m3fn]


def poisoned_cache(
    num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> LayerCache:
    """Make a cache of NaN; integers have NaN for their scales."""
    shape = CacheShape(num_kv_heads, head_dim, head_dim)
    (cache,) = allocate_caches(1, num_blocks, block_size, shape, dtype, device).layers()
    for tensor in cache.tensors:
        tensor.fill_(77 if tensor.dtype == torch.int8 else float("nan"))
    return cache


def transposed(keys: torch.Tensor) -> torch.Tensor:
    """Return a copy in which the tokens of a block lie side by side.

    Shapes:
        keys, result: `[num_blocks, block_size, num_kv_heads, key_dim]`
    """
    return keys.movedim(-3, -1).contiguous().movedim(-1, -3)


def assert_caches_close(actual: LayerCache, expected: LayerCache) -> None:
    """Compare caches that were written by two implementations of the same: the same slots, the same numbers."""
    for kind, (mine, theirs) in enumerate(((actual.keys, expected.keys), (actual.values, expected.values))):
        if actual.scales is None or expected.scales is None:
            assert torch.equal(mine.isnan(), theirs.isnan())
            assert_close(mine.nan_to_num(), theirs.nan_to_num())
            continue
        scales, their_scales = (cache.scales[..., kind].transpose(1, 2) for cache in (actual, expected))
        torch.testing.assert_close(scales, their_scales, rtol=1e-3, atol=0, equal_nan=True)
        assert torch.equal(dequantize_heads(mine, scales).isnan(), dequantize_heads(theirs, their_scales).isnan())
        # A step of eight bits where a sum in another order was rounded the other way.
        steps = (mine.view(torch.uint8).int() - theirs.view(torch.uint8).int() + 1) % 256
        assert (steps <= 2).all()
        assert (steps != 1).float().mean() < 0.01


def assert_stands_for(cache: LayerCache, kind: int, slots: torch.Tensor, heads: torch.Tensor) -> None:
    """Check that a cache in eight bits holds these heads, `[num_slots, num_kv_heads, head_dim]`, as well as it can."""
    stored = (cache.keys, cache.values)[kind]
    assert cache.scales is not None
    assert is_quantized(stored.dtype)
    found = dequantize_heads(stored, cache.scales[..., kind].transpose(1, 2)).flatten(0, 1)[slots]
    largest = heads.abs().amax(-1, keepdim=True)
    # Half a step: of 127 steps to the largest, or of three bits of fraction.
    step = largest / 127 if stored.dtype == torch.int8 else (heads.abs() / 8).clamp(min=largest * 2**-9 / 448)
    assert ((found - heads).abs() <= 0.502 * step + 1e-3 * heads.abs()).all()
