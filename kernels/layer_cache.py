"""The KV cache of a layer, and of layers alike: keys and values in blocks, and in eight bits their scales.

In eight bits each head of each token has a scale of its own, so that a token can be added to a block without touching
the others. The scales of a layer are one tensor, `[num_blocks, num_kv_heads, block_size, 2]` float16: that of the key,
then that of the value. A reader of one head finds the scales of a block side by side, and both of a token in 32 bits.
"""

from __future__ import annotations

from dataclasses import dataclass

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


# Keys that lie transposed are read as vectors of this many tokens, or of half as many.
_VECTOR_TOKENS = 16


@dataclass(frozen=True, slots=True)
class CachedTokens:
    """Which tokens of a sequence a cache has: every `step`th, from `first` on."""

    first: int = 0
    step: int = 1


EVERY_TOKEN = CachedTokens()


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What a layer keeps of a token; in a latent cache values are the first `value_dim` numbers of the keys."""

    num_kv_heads: int
    key_dim: int
    value_dim: int
    is_latent: bool = False

    def __post_init__(self) -> None:
        assert not self.is_latent or self.value_dim <= self.key_dim


@dataclass(frozen=True, slots=True)
class LayerCache:
    """What the tokens of a layer have left behind for those after them.

    Attributes:
        keys: `[num_blocks, block_size, num_kv_heads, key_dim]`. On a CPU they are transposed where they can be
            (`can_transpose`): memory is `[num_blocks, num_kv_heads, key_dim, block_size]`. Else contiguous.
        values: `[num_blocks, block_size, num_kv_heads, value_dim]`, contiguous; of a latent cache the first numbers of
            the keys, a strided view.
        scales: `[num_blocks, num_kv_heads, block_size, 2]` float16 where keys and values have eight bits
            (`kernels.layer_cache`), else None.
        is_latent: Whether values are a part of the keys.
    """

    keys: torch.Tensor
    values: torch.Tensor
    scales: torch.Tensor | None = None
    is_latent: bool = False

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Return all that there is, each number once."""
        own = (self.keys,) if self.is_latent else (self.keys, self.values)
        return own if self.scales is None else (*own, self.scales)

    @property
    def block_bytes(self) -> int:
        """Return the memory of one block."""
        return sum(tensor[0].nbytes for tensor in self.tensors)


@dataclass(frozen=True, slots=True)
class StackedCaches:
    """The caches of layers of one shape in one piece: the tensors of a layer with a dimension of layers in front."""

    keys: torch.Tensor
    values: torch.Tensor
    scales: torch.Tensor | None = None
    is_latent: bool = False

    def layers(self) -> list[LayerCache]:
        """Return each layer's share."""
        scales = [None] * len(self.keys) if self.scales is None else self.scales
        parts = zip(self.keys, self.values, scales, strict=True)
        return [LayerCache(keys, values, scale, self.is_latent) for keys, values, scale in parts]


def can_transpose(block_size: int, key_dim: int) -> bool:
    """Return True where the CPU kernels read keys of this shape that lie transposed in their block.

    The keys of a block are then the matrix that queries are multiplied with, and need not be transposed in every step.
    """
    return block_size % _VECTOR_TOKENS == 0 and key_dim % 2 == 0


def allocate_caches(
    num_layers: int, num_blocks: int, block_size: int, shape: CacheShape, dtype: torch.dtype, device: torch.device
) -> StackedCaches:
    """Allocate the caches of layers of one shape. Their contents are undefined."""
    slots = (num_layers, num_blocks, block_size, shape.num_kv_heads)
    # The values that are a part of latent keys are read token by token.
    if device.type == "cpu" and not shape.is_latent and can_transpose(block_size, shape.key_dim):
        sizes = (num_layers, num_blocks, shape.num_kv_heads, shape.key_dim, block_size)
        keys = torch.empty(sizes, dtype=dtype, device=device).permute(0, 1, 4, 2, 3)
    else:
        keys = torch.empty((*slots, shape.key_dim), dtype=dtype, device=device)
    if shape.is_latent:
        values = keys[..., : shape.value_dim]
    else:
        values = torch.empty((*slots, shape.value_dim), dtype=dtype, device=device)
    if not is_quantized(dtype):
        return StackedCaches(keys, values, None, shape.is_latent)
    scales = torch.empty(
        (num_layers, *scales_shape(num_blocks, block_size, shape.num_kv_heads)), dtype=SCALE_DTYPE, device=device
    )
    return StackedCaches(keys, values, scales, shape.is_latent)
