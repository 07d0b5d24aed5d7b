"""Products of adapters in plain torch: the oracle of the kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.low_rank.form import LowRank


def low_rank_reference(
    x: torch.Tensor, result: torch.Tensor, slots: Sequence[int], adapters: Sequence[LowRank | None]
) -> None:
    """Add to each row of `result` what the adapter of its slot makes of `x`, in float32, rounded once.

    Args:
        x: `[num_rows, in_features]`, inputs of the matrix.
        result: `[num_rows, out_features]`, its products.
        slots: Of each row; below zero without an adapter.
        adapters: By slot; None leaves the matrix as it is.
    """
    for slot in sorted({slot for slot in slots if slot >= 0}):
        adapter = adapters[slot]
        if adapter is None:
            continue
        rows = torch.tensor([row for row, own in enumerate(slots) if own == slot], device=x.device)
        added = result[rows].float()
        for part in adapter.parts:
            product = x[rows].float() @ part.down.float().T * part.scale
            added[:, part.features] += product @ part.up.float().T
        result[rows] = added.to(result.dtype)
