"""Mamba-2's state update in plain torch, a chunk of tokens at a time, in matrix products.

Within a chunk a token reads those before it as attention does, with scores that fade; the state is read and written
once a chunk. Source: Dao and Gu, arXiv 2405.21060, section 6. Decays stay in log space until they are differences,
which are never positive.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from kernels.ssd.reference import SsdInputs, SsdSizes, SsdWeights, take_apart
from kernels.state_rows import StateRows, sequences_of

CHUNK = 64


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
    for sequence in sequences_of(rows):
        state = states[sequence.slot].to(inputs.value.dtype)
        if sequence.is_new:
            state = torch.zeros_like(state)
        behind = {0: state}
        # What is kept or copied ends with a chunk.
        for before, count in pairwise((0, *sequence.ends)):
            for start in range(sequence.first + before, sequence.first + count, chunk):
                tokens = slice(start, min(start + chunk, sequence.first + count))
                read, state = _run_chunk(inputs, tokens, state)
                result[tokens] = read + skipped[tokens]
            behind[count] = state
        if not sequence.is_padding:
            for count, slot in (*sequence.saves, (sequence.num_kept, sequence.slot)):
                states[slot] = behind[count]
    return result


def _run_chunk(inputs: SsdInputs, tokens: slice, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what a chunk reads, `[num_tokens, num_heads, head_dim]`, and the state behind it."""
    parts = (inputs.scaled, inputs.input, inputs.output)
    scaled, state_input, output = (part[tokens].transpose(0, 1) for part in parts)
    total = inputs.log_decay[tokens].t().cumsum(1)
    # From the token of a column to that of a row.
    decay = (total[:, :, None] - total[:, None]).tril().exp().tril()
    read = (output @ state_input.transpose(1, 2) * decay) @ scaled + total.exp()[..., None] * (output @ state)
    until_end = (total[:, -1:] - total).exp()[..., None]
    state = state * total[:, -1, None, None].exp() + (state_input * until_end).transpose(1, 2) @ scaled
    return read.transpose(0, 1), state
