"""The gated delta rule in plain torch, a chunk of tokens at a time, in matrix products.

Within a chunk the corrections of all tokens are the solution of one triangular system, since each depends on those
before it alone; the state is read and written once a chunk.
Source: Yang et al., arXiv 2412.06464, section 3.3, and 2406.06484, equation 10. Decays stay in log space until they are
differences, which are never positive.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from kernels.gated_delta.reference import DeltaInputs, DeltaSizes, DeltaWeights, take_apart
from kernels.state_rows import StateRows, sequences_of

CHUNK = 64


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
    for sequence in sequences_of(rows):
        state = states[sequence.slot].to(inputs.value.dtype)
        if sequence.is_new:
            state = torch.zeros_like(state)
        behind = {0: state}
        # What is kept or copied ends with a chunk.
        for before, count in pairwise((0, *sequence.ends)):
            for start in range(sequence.first + before, sequence.first + count, chunk):
                tokens = slice(start, min(start + chunk, sequence.first + count))
                result[tokens], state = _run_chunk(inputs, tokens, state)
            behind[count] = state
        if not sequence.is_padding:
            for count, slot in (*sequence.saves, (sequence.num_kept, sequence.slot)):
                states[slot] = behind[count]
    return result


def _run_chunk(inputs: DeltaInputs, tokens: slice, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the results of a chunk, `[num_tokens, num_heads, value_dim]`, and the state behind it."""
    query, key, value = (part[tokens].transpose(0, 1) for part in (inputs.query, inputs.key, inputs.value))
    strength = inputs.strength[tokens].t()[..., None]
    total = inputs.log_decay[tokens].t().cumsum(1)
    count = total.shape[1]
    # From the token of a column to that of a row.
    decay = (total[:, :, None] - total[:, None]).tril().exp().tril()
    since_start = total.exp()[..., None]
    system = (strength * (key @ key.transpose(1, 2)) * decay).tril(-1)
    system = system + torch.eye(count, dtype=system.dtype, device=system.device)
    wanted = strength * (value - since_start * (key @ state))
    corrections = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    result = since_start * (query @ state) + (query @ key.transpose(1, 2) * decay) @ corrections
    until_end = (total[:, -1:] - total).exp()[..., None]
    state = state * total[:, -1, None, None].exp() + (key * until_end).transpose(1, 2) @ corrections
    return result.transpose(0, 1), state
