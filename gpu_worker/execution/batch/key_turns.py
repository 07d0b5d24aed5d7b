"""Turns cached keys back to earlier positions, where tokens before them have left the cache.

Rotations compose: a key at position `p` that turns back by `d` positions is the key at position `p - d`. Keys of eight
bits are taken apart, turned and made anew. Nothing else of a block depends on its place.
Source: Xiao et al., arXiv 2309.17453, section 3.2; Su et al., arXiv 2104.09864, equation 34.
"""

from __future__ import annotations

from collections.abc import Sequence as Values
from functools import partial

import numpy as np
import torch

from gpu_worker.core.plan import Eviction
from gpu_worker.execution.batch.transfers import StagedArray, Upload
from gpu_worker.execution.memory.kv_cache import KVCache
from gpu_worker.models.decoder import CausalLM
from kernels.layer_cache import LayerCache, dequantize_heads, quantize_heads


class KeyTurns:
    """Applies evictions to the layers that keep all tokens."""

    def __init__(self, model: CausalLM, cache: KVCache) -> None:
        self._model = model
        self._cache = cache

    def apply(self, evictions: Values[Eviction], upload: Upload) -> None:
        """Move and turn the blocks of evictions, one after another, when the upload arrives."""
        for eviction in evictions:
            if not eviction.moves:
                continue
            columns = np.array(eviction.moves, dtype=np.int64).T
            staged = [upload.add(column) for column in columns]
            upload.on_arrival(partial(self._turn_staged, staged, is_copied=bool((columns[0] != columns[1]).any())))

    def _turn_staged(self, staged: Values[StagedArray], *, is_copied: bool) -> None:
        self.turn(*(column.tensor for column in staged), is_copied=is_copied)

    def turn(
        self, sources: torch.Tensor, targets: torch.Tensor, shifts: torch.Tensor, *, is_copied: bool = True
    ) -> None:
        """Let `targets` hold what `sources` do, with keys turned back by `shifts` positions; all `[num_blocks]` int64.

        Without `is_copied`, targets are the sources.
        """
        turns: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for layer in self._cache.layout.groups[0].layers:
            table = self._model.rotary_table(layer)
            if id(table) not in turns:
                turns[id(table)] = _turns(table, shifts)
            _turn_layer(self._cache.layers[layer], sources, targets, turns[id(table)], is_copied=is_copied)


def _turns(table: torch.Tensor, shifts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines of the angles by which keys turn back; `[num_blocks, 1, 1, head_dim / 2]`."""
    # Cosines and sines of YaRN and LongRoPE have an amplitude, which keys have already.
    amplitudes, _ = table[0].chunk(2)
    cos, sin = (part / amplitudes for part in table[shifts].chunk(2, dim=-1))
    return cos[:, None, None], sin[:, None, None]


def _turn_layer(
    cache: LayerCache,
    sources: torch.Tensor,
    targets: torch.Tensor,
    turn: tuple[torch.Tensor, torch.Tensor],
    *,
    is_copied: bool,
) -> None:
    keys, (cos, sin) = cache.keys[sources], turn
    if cache.scales is None:
        wide = keys.float()
    else:
        scales = cache.scales[sources]
        wide = dequantize_heads(keys, scales[..., 0].transpose(1, 2))
    first, second = wide.chunk(2, dim=-1)
    turned = torch.cat((first * cos + second * sin, second * cos - first * sin), dim=-1)
    if is_copied:
        cache.values[targets] = cache.values[sources]
    if cache.scales is None:
        cache.keys[targets] = turned.to(keys.dtype)
        return
    cache.keys[targets], of_keys = quantize_heads(turned, keys.dtype)
    scales[..., 0] = of_keys.transpose(1, 2)
    cache.scales[targets] = scales
