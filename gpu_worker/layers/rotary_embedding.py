"""Rotary position embedding: a table of the rotations of every position, its rows computed once."""

from __future__ import annotations

import torch

from gpu_worker.layers.rope_scaling import RopeParameters, for_length, rope_amplitude, rope_angles

# Rows that are computed at once: a table of millions needs no second one of angles beside it.
CHUNK = 1 << 16


def rotary_table(
    parameters: RopeParameters, head_dim: int, max_len: int, device: torch.device, rotary_dim: int | None = None
) -> torch.Tensor:
    """Compute cosines and sines of positions below `max_len`, as `kernels.rope_kv_write` takes them.

    Shapes:
        result: `[max_len, head_dim]` float32, the cosines, then the sines
    """
    table = torch.empty(max_len, head_dim)
    fill_rows(table, for_length(parameters, max_len), rotary_dim or head_dim, 0, max_len)
    return table.to(device)


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
