"""The gated delta rule in plain torch, a chunk of tokens at a time, in matrix products.

Within a chunk the corrections of all tokens are the solution of one triangular system, since each depends on those
before it alone.
Source: Yang et al., arXiv 2412.06464, section 3.3, and 2406.06484, equation 10.
"""

from __future__ import annotations

import torch

from kernels.gated_delta.reference import DeltaInputs, DeltaSizes, DeltaWeights, take_apart
from kernels.matrix_state.fading import Fading, fading_of, read_and_add
from kernels.matrix_state.walk import CHUNK, walk
from kernels.state_rows import StateRows


def gated_delta_chunked(
    qkv: torch.Tensor,
    gates: torch.Tensor,
    weights: DeltaWeights,
    sizes: DeltaSizes,
    states: torch.Tensor,
    rows: StateRows,
    *,
    chunk: int = CHUNK,
) -> torch.Tensor:
    """Compute what `kernels.gated_delta.gated_delta` promises."""
    inputs = take_apart(qkv, gates, weights, sizes)
    result = torch.empty(inputs.value.shape, dtype=qkv.dtype, device=qkv.device)

    def update(tokens: slice, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        query, key = (part[tokens].transpose(0, 1) for part in (inputs.query, inputs.key))
        fading = fading_of(inputs.log_decay[tokens])
        return read_and_add(query, key, _corrections(inputs, tokens, key, fading, state), fading, state)

    return walk(update, result, states, rows, chunk=chunk)


def _corrections(
    inputs: DeltaInputs, tokens: slice, key: torch.Tensor, fading: Fading, state: torch.Tensor
) -> torch.Tensor:
    value, strength = inputs.value[tokens].transpose(0, 1), inputs.strength[tokens].t()[..., None]
    system = (strength * (key @ key.transpose(1, 2)) * fading.between).tril(-1)
    system = system + torch.eye(key.shape[1], dtype=system.dtype, device=system.device)
    wanted = strength * (value - fading.since_start * (key @ state))
    corrections: torch.Tensor = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    return corrections
