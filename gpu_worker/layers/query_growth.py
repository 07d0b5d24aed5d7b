"""What queries are multiplied by, by their position, in models whose queries grow beyond the length of a training."""

from __future__ import annotations

from dataclasses import dataclass

import torch


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
