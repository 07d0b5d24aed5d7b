"""The KV cache of a layer: keys and values in blocks, and in eight bits their scales."""

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


def allocate_layer_cache(
    num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> LayerCache:
    """Allocate a cache. Its contents are undefined."""
    shape = (num_blocks, block_size, num_kv_heads, head_dim)
    keys, values = (torch.empty(shape, dtype=dtype, device=device) for _ in range(2))
    if not is_quantized(dtype):
        return LayerCache(keys, values)
    scales = torch.empty(scales_shape(num_blocks, block_size, num_kv_heads), dtype=SCALE_DTYPE, device=device)
    return LayerCache(keys, values, scales)
