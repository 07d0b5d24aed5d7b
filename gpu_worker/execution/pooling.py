"""Answers made of hidden vectors: what a step contributes to them, for the sequences of it that want one."""

from __future__ import annotations

from collections.abc import Sequence as Values
from dataclasses import dataclass

import numpy as np
import torch

from gpu_worker.core.batch_sequences import Share
from gpu_worker.core.pooling import PoolingPlan, Readout
from gpu_worker.execution.batch.transfers import Int32s
from gpu_worker.models.decoder import CausalLM
from kernels.low_rank import AdapterRows

# Of the numbers around it, float64 has the multiples of 2^-34.
_GRID = 1.5 * 2**18
_ROWS_AT_ONCE = 1024


@dataclass(frozen=True, slots=True)
class PooledChunk:
    """Hidden vectors of one sequence that count in its answer.

    Attributes:
        place: Of its sequence in the plan.
        first_row: The first of them among those of the step.
        num_rows: How many there are; of several, the sum counts, the same to the bit however steps divide the tokens.
    """

    place: int
    first_row: int
    num_rows: int
    plan: PoolingPlan


def pooled_chunks(shares: Values[Share], query_starts: Int32s) -> list[PooledChunk]:
    """Return the hidden vectors of a step that count in an answer."""
    chunks = []
    for place, item in enumerate(shares):
        plan = item.sequence.pooling
        if plan is None:
            continue
        first, end = int(query_starts[place]), item.start + item.num_tokens
        if plan.rows == "mean":
            chunks.append(PooledChunk(place, first, item.num_tokens, plan))
        elif plan.rows == "first" and item.start == 0:
            chunks.append(PooledChunk(place, first, 1, plan))
        elif plan.rows == "last" and end == len(item.sequence.token_ids):
            chunks.append(PooledChunk(place, first + item.num_tokens - 1, 1, plan))
    return chunks


@dataclass(frozen=True, slots=True)
class PooledRows:
    """What a step contributes to the answers of the sequences at `places` of its plan.

    Shapes:
        values: `[len(places), width]` float64
    """

    places: list[int]
    values: torch.Tensor


def pool(
    model: CausalLM,
    hidden: torch.Tensor,
    chunks: Values[PooledChunk],
    adapters: AdapterRows | None = None,
) -> list[PooledRows]:
    """Compute what chunks contribute, without waiting for the device.

    Shapes:
        hidden: `[num_tokens, hidden_size]`, of the whole step; tapped layers may follow as further columns
    """
    if not chunks:
        return []
    groups: dict[Readout, list[PooledChunk]] = {}
    for chunk in chunks:
        groups.setdefault(chunk.plan.readout, []).append(chunk)
    hidden = hidden[:, : model.config.hidden_size]
    pooled = []
    for readout, group in groups.items():
        rows = torch.cat([_pooled_row(hidden, chunk) for chunk in group])
        own = None if adapters is None else adapters.of(np.array([chunk.first_row for chunk in group]))
        values = _read(model, rows, readout, own).double()
        pooled.append(PooledRows([chunk.place for chunk in group], values))
    return pooled


def _pooled_row(hidden: torch.Tensor, chunk: PooledChunk) -> torch.Tensor:
    """Return the one row, or the sum of all in the numbers of `_on_grid`, `[1, hidden_size]`; their mean to a head."""
    rows = hidden[chunk.first_row : chunk.first_row + chunk.num_rows]
    if chunk.plan.rows != "mean":
        return rows.float()
    total = torch.stack([_on_grid(part).sum(0) for part in torch.split(rows, _ROWS_AT_ONCE)]).sum(0, keepdim=True)
    if chunk.plan.readout == "hidden":
        return total
    assert chunk.plan.is_whole, "a mean is known when all tokens are"
    return total / chunk.num_rows


def _on_grid(rows: torch.Tensor) -> torch.Tensor:
    """Return float64 numbers that are multiples of 2^-34, whose sums are exact as long as they stay below 2^18.

    So a sum does not depend on the order of its numbers, nor on which of them are summed first. Float32 is no finer
    from 2^-10 on. NaN stays NaN.
    """
    return rows.double().add_(_GRID).sub_(_GRID)


def _read(model: CausalLM, rows: torch.Tensor, readout: Readout, adapters: AdapterRows | None) -> torch.Tensor:
    if readout == "hidden":
        return rows
    rows = rows.float()
    if readout == "classes":
        return model.classify(rows)
    return model.vocabulary.columns(model.logits(rows, adapters), readout)
