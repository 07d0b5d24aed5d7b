"""Keys and values in eight bits: the types, and how the head of a token becomes one of them.

Each head of each token has a scale of its own, so that a token can be added to a block without touching the others.
The scales of a layer are one tensor, `[num_blocks, num_kv_heads, block_size, 2]` float16: that of the key, then that of
the value. A reader of one head finds the scales of a block side by side, and both of a token in 32 bits.
"""

from __future__ import annotations

import torch

SCALE_DTYPE = torch.float16
# The largest magnitude of each type, which the largest magnitude of a head becomes.
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
_LARGEST_SCALE = torch.finfo(SCALE_DTYPE).max


def is_quantized(dtype: torch.dtype) -> bool:
    """Return True where a cache of this type has scales."""
    return dtype in LARGEST


def scales_shape(num_blocks: int, block_size: int, num_kv_heads: int) -> tuple[int, int, int, int]:
    """Return the shape of a layer's scales."""
    return (num_blocks, num_kv_heads, block_size, 2)


def quantize_heads(heads: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return heads in eight bits, and their scales.

    The scale is rounded first: what it loses is in what it divides. A head of zeros has the scale zero.

    Shapes:
        heads, first result: `[..., head_dim]`
        second result: `[...]` float16
    """
    largest, wide = LARGEST[dtype], heads.float()
    scales = (wide.abs().amax(-1) / largest).clamp(max=_LARGEST_SCALE).to(SCALE_DTYPE)
    inverse = torch.where(scales > 0, 1.0 / scales.float(), 0.0)
    scaled = (wide * inverse[..., None]).clamp(-largest, largest)
    return (scaled.round() if dtype == torch.int8 else scaled).to(dtype), scales


def dequantize_heads(heads: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return what `quantize_heads` was given, as nearly as eight bits can say, in float32."""
    return heads.float() * scales.float()[..., None]
