"""The KV cache of a layer, and of all layers: keys and values in blocks, and in eight bits their scales."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.quantized_kv import SCALE_DTYPE, is_quantized, scales_shape


@dataclass(frozen=True, slots=True)
class LayerCache:
    """What the tokens of a layer have left behind for those after them.

    Attributes:
        keys: `[num_blocks, block_size, num_kv_heads, head_dim]`, contiguous.
        values: Likewise.
        scales: `[num_blocks, num_kv_heads, block_size, 2]` float16 where keys and values have eight bits
            (`kernels.quantized_kv`), else None.
    """

    keys: torch.Tensor
    values: torch.Tensor
    scales: torch.Tensor | None = None

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Return all that there is."""
        return (self.keys, self.values) if self.scales is None else (self.keys, self.values, self.scales)

    @property
    def block_bytes(self) -> int:
        """Return the memory of one block."""
        return sum(tensor[0].nbytes for tensor in self.tensors)


@dataclass(frozen=True, slots=True)
class StackedCaches:
    """The caches of all layers in one piece, so that what concerns all of them is few operations.

    Attributes:
        keys, values, scales: As those of a layer, with the layers before all else.
    """

    keys: torch.Tensor
    values: torch.Tensor
    scales: torch.Tensor | None = None

    def layers(self) -> list[LayerCache]:
        """Return each layer's share."""
        scales = [None] * len(self.keys) if self.scales is None else self.scales
        return [LayerCache(*parts) for parts in zip(self.keys, self.values, scales, strict=True)]

    def move(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy what tokens have left behind to other slots, `block * block_size + offset`, which may be sources too.

        Shapes:
            source, target: `[num_tokens]` int64; no slot is twice in `target`
        """
        for tensor in (self.keys, self.values):
            # As bytes: on CPUs torch does not copy every type by index.
            slots = tensor.view(torch.uint8).flatten(1, 2)
            slots.index_copy_(1, target, slots.index_select(1, source))
        if self.scales is not None:
            block_size = self.keys.shape[2]
            (blocks, offsets), (from_blocks, from_offsets) = (
                (slots // block_size, slots % block_size) for slots in (target, source)
            )
            self.scales[:, blocks, :, offsets] = self.scales[:, from_blocks, :, from_offsets]


def allocate_layer_cache(
    num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> LayerCache:
    """Allocate a cache. Its contents are undefined."""
    return allocate_layer_caches(1, num_blocks, block_size, num_kv_heads, head_dim, dtype, device).layers()[0]


def allocate_layer_caches(
    num_layers: int,
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> StackedCaches:
    """Allocate the caches of all layers. Their contents are undefined."""
    shape = (num_layers, num_blocks, block_size, num_kv_heads, head_dim)
    keys, values = (torch.empty(shape, dtype=dtype, device=device) for _ in range(2))
    if not is_quantized(dtype):
        return StackedCaches(keys, values)
    scales = (num_layers, *scales_shape(num_blocks, block_size, num_kv_heads))
    return StackedCaches(keys, values, torch.empty(scales, dtype=SCALE_DTYPE, device=device))
