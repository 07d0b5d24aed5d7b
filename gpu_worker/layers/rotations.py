"""The rotary tables of a model, made once for all layers that share one.

A configuration may claim millions of positions. A table's memory is only asked for then, and its rows are computed when
a sequence comes near them: what no sequence reaches costs neither time nor memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gpu_worker.layers.rope_scaling import RopeParameters, for_length
from gpu_worker.layers.rotary_embedding import CHUNK, fill_rows


class Rotations:
    """Makes tables when they are first asked for. Those that load a model share one of these.

    Owns the tables and how many of their rows are computed; one thread uses it.
    """

    __slots__ = ("_device", "_max_len", "_num_filled", "_ropes", "_tables")

    def __init__(
        self, ropes: Sequence[RopeParameters], max_len: int, device: torch.device, *, is_lazy: bool = False
    ) -> None:
        """Make tables of these rotations, which `AttentionShape.rotary` counts, for positions below `max_len`.

        Args:
            ropes: The model's rotations.
            max_len: Positions of the tables.
            device: Where they are.
            is_lazy: On a CPU, compute later rows when `cover` asks for them; a GPU reads its tables unasked.
        """
        self._ropes = [for_length(rope, max_len) for rope in ropes]
        self._max_len = max_len
        self._device = device
        self._num_filled = min(CHUNK, max_len) if is_lazy and device.type == "cpu" else max_len
        self._tables: dict[tuple[int | None, int, int], torch.Tensor] = {}

    def of(self, rotary: int | None, head_dim: int, rotary_dim: int | None = None) -> torch.Tensor:
        """Return the table of a layer, `[max_len, head_dim]` float32: the cosines, then the sines.

        Args:
            rotary: Which rotation; None turns nothing.
            head_dim: Size of a head.
            rotary_dim: Dimensions of a head that turn; None is all.
        """
        key = (rotary, head_dim, rotary_dim or head_dim)
        if key not in self._tables:
            table = torch.empty(self._max_len, head_dim)
            self._fill(key, table, 0, self._num_filled)
            self._tables[key] = table.to(self._device)
        return self._tables[key]

    def cover(self, positions: torch.Tensor) -> None:
        """See to it that the rows of these positions are computed, `[num_tokens]` int64."""
        if self._num_filled == self._max_len or not len(positions):
            return
        needed = int(positions.max()) + 1
        if needed <= self._num_filled:
            return
        end = min(-(-needed // CHUNK) * CHUNK, self._max_len)
        for key, table in self._tables.items():
            self._fill(key, table, self._num_filled, end)
        self._num_filled = end

    def _fill(self, key: tuple[int | None, int, int], table: torch.Tensor, first: int, end: int) -> None:
        rotary, _, rotary_dim = key
        fill_rows(table, None if rotary is None else self._ropes[rotary], rotary_dim, first, end)
