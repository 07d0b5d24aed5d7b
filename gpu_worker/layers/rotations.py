"""The rotary tables of a model, made once for all layers that share one, and the order of dimensions that they turn.

A configuration may claim millions of positions. A table's memory is only asked for then, and its rows are computed when
a sequence comes near them: what no sequence reaches costs neither time nor memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gpu_worker.layers.rope_scaling import RopeParameters, for_length, rope_amplitude, rope_angles

# Rows that are computed at once: a table of millions needs no second one of angles beside it.
CHUNK = 1 << 16


@dataclass(frozen=True, slots=True)
class QueryGrowth:
    """Queries at position `p` are multiplied by `1 + factor * log(1 + (p + shift) // length)`."""

    factor: float
    length: int
    shift: int = 0


class GrowthTable:
    """The factors of a layer.

    A table, because torch's logarithm on a CPU rounds by where a number lies among those of the step.
    """

    def __init__(self, growth: QueryGrowth, num_positions: int, device: torch.device) -> None:
        num_stretches = (num_positions - 1 + growth.shift) // growth.length + 1
        self._growth = growth
        self._factors = 1 + growth.factor * torch.log1p(torch.arange(num_stretches, device=device))

    def scaled(self, query: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return queries, `[num_tokens, num_heads, head_dim]`, times the factors of their `[num_tokens]` positions."""
        factors = self._factors.index_select(0, (positions + self._growth.shift) // self._growth.length)
        return query * factors.to(query.dtype)[:, None, None]


def fill_rows(table: torch.Tensor, parameters: RopeParameters | None, rotary_dim: int, first: int, end: int) -> None:
    """Compute the rows of positions from `first` to before `end`; without parameters, rotations that turn nothing.

    Dimension `i` of a head is paired with dimension `i + head_dim / 2`. Where only `rotary_dim` dimensions turn, pairs
    from `rotary_dim / 2` on stay as they are.
    Source: Su et al., arXiv 2104.09864, equation 34.

    Shapes:
        table: `[max_len, head_dim]` float32
    """
    half, turning = table.shape[1] // 2, rotary_dim // 2
    for begin in range(first, end, CHUNK):
        rows = table[begin : min(begin + CHUNK, end)]
        rows[:, :half] = 1
        rows[:, half:] = 0
        if parameters is not None:
            angles = rope_angles(parameters, rotary_dim, torch.arange(begin, begin + len(rows)))
            amplitude = rope_amplitude(parameters)
            rows[:, :turning] = angles.cos() * amplitude
            rows[:, half : half + turning] = angles.sin() * amplitude


class Rotations:
    """Makes tables when they are first asked for. Those that load a model share one of these.

    Owns the tables and how many of their rows are computed; one thread uses it.
    """

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

        `rotary_dim` dimensions of a head turn, all if None; without `rotary` none does.
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


def head_order(dim: int, turning: int, *, is_interleaved: bool) -> list[int] | None:
    """Return which of the checkpoint's dimensions each of a head's is; None where they stay in order.

    The product of a query and a key does not depend on the order of their dimensions, as long as both have the same. So
    rows of both projections are put, once, in the order in which dimension `i` turns with `i + head_dim / 2`, whichever
    the checkpoint pairs. Those that do not turn have an angle of zero. No kernel knows of it.
    """
    if turning == dim and not is_interleaved:
        return None
    half, still = turning // 2, (dim - turning) // 2
    if is_interleaved:
        first, second = range(0, turning, 2), range(1, turning, 2)
    else:
        first, second = range(half), range(half, turning)
    return [*first, *range(turning, turning + still), *second, *range(turning + still, dim)]


def head_rows(order: list[int], num_heads: int, first: int = 0) -> torch.Tensor:
    """Return the rows of a projection to this many heads in their order; `[num_heads * len(order)]` int64."""
    heads = torch.arange(num_heads)[:, None] * len(order)
    return (heads + torch.tensor(order)).flatten() + first


def gated_rows(order: list[int], num_heads: int) -> torch.Tensor:
    """Return the rows of all queries, then all gates, so that the gate of a head stands behind its query."""
    dim, heads = len(order), torch.arange(num_heads)[:, None] * len(order)
    queries, gates = heads + torch.tensor(order), heads + torch.arange(dim) + num_heads * dim
    return torch.cat((queries, gates), dim=1).flatten()


def rows_by_head(order: list[int], num_heads: int) -> torch.Tensor:
    """Return the rows of all queries, then all keys, then all values, which lie as those of a head, then the next's."""
    dim, turned = len(order), torch.tensor(order)
    heads = torch.arange(num_heads)[:, None] * 3 * dim
    parts = (turned, turned + dim, torch.arange(dim) + 2 * dim)
    return torch.cat([(heads + part).flatten() for part in parts])
