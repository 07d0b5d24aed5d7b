"""The rotary tables of a model, made once for all layers that share one."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gpu_worker.layers.layer_traits import AttentionShape
from gpu_worker.layers.rope_scaling import RopeParameters
from gpu_worker.layers.rotary_embedding import rotary_table, unrotated_table


class Rotations:
    """Makes tables when they are first asked for. Those that load a model share one of these."""

    __slots__ = ("_device", "_max_len", "_ropes", "_tables")

    def __init__(self, ropes: Sequence[RopeParameters], max_len: int, device: torch.device) -> None:
        """Make tables of these rotations, which `AttentionShape.rotary` counts, for positions below `max_len`."""
        self._ropes = ropes
        self._max_len = max_len
        self._device = device
        self._tables: dict[tuple[int | None, int, int], torch.Tensor] = {}

    def of(self, shape: AttentionShape) -> torch.Tensor:
        """Return the table of a layer, `[max_len, head_dim]` float32: the cosines, then the sines."""
        key = (shape.rotary, shape.head_dim, shape.rotary_dim or shape.head_dim)
        if key not in self._tables:
            self._tables[key] = self._table(*key)
        return self._tables[key]

    def _table(self, rotary: int | None, head_dim: int, rotary_dim: int) -> torch.Tensor:
        if rotary is None:
            return unrotated_table(head_dim, self._max_len).to(self._device)
        return rotary_table(self._ropes[rotary], head_dim, self._max_len, self._device, rotary_dim)
