"""Adapters beside a matrix as tests make them: of mixed ranks, some for parts of the features."""

from __future__ import annotations

import numpy as np
import torch

from kernels.low_rank import LowRank, LowRankPart


def make_adapter(
    ranks: list[int],
    rows: list[int],
    num_inputs: int,
    generator: torch.Generator,
    dtype: torch.dtype = torch.float32,
    *,
    is_gated: bool = False,
) -> LowRank:
    """Make an adapter for modules of `rows` features each, in a random order; rank 0 leaves a module out."""
    num_outputs = sum(rows)
    order = torch.randperm(num_outputs, generator=generator)
    parts, first = [], 0
    for rank, count in zip(ranks, rows, strict=True):
        if rank:
            down = torch.randn(rank, num_inputs, generator=generator) * num_inputs**-0.5
            up = torch.randn(count, rank, generator=generator)
            features = order[first : first + count]
            parts.append(LowRankPart(down.to(dtype), up.to(dtype), 0.5 + rank % 3, features))
        first += count
    return LowRank(tuple(parts), (num_outputs, num_inputs), is_gated)


def slots_of(*slots: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """Return the slots of rows."""
    return np.array(slots, dtype=np.int32)
