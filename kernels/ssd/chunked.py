"""Mamba-2's state update in plain torch, a chunk of tokens at a time, in matrix products.

Source: Dao and Gu, arXiv 2405.21060, section 6.
"""

from __future__ import annotations

import torch

from kernels.matrix_state.fading import fading_of, read_and_add
from kernels.matrix_state.walk import CHUNK, walk
from kernels.ssd.reference import SsdSizes, SsdWeights, take_apart
from kernels.state_rows import StateRows


def ssd_chunked(
    features: torch.Tensor,
    steps: torch.Tensor,
    weights: SsdWeights,
    sizes: SsdSizes,
    states: torch.Tensor,
    rows: StateRows,
    *,
    chunk: int = CHUNK,
) -> torch.Tensor:
    """Compute what `kernels.ssd.ssd` promises."""
    inputs = take_apart(features, steps, weights, sizes)
    result = torch.empty(inputs.value.shape, dtype=features.dtype, device=features.device)
    skipped = inputs.value * weights.skip[:, None]

    def update(tokens: slice, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        parts = (inputs.output, inputs.input, inputs.scaled)
        output, state_input, scaled = (part[tokens].transpose(0, 1) for part in parts)
        read, state = read_and_add(output, state_input, scaled, fading_of(inputs.log_decay[tokens]), state)
        return read + skipped[tokens], state

    return walk(update, result, states, rows, chunk=chunk)
