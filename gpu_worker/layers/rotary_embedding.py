"""Rotary position embedding: a table of the rotations of every position, made once."""

from __future__ import annotations

import torch

from gpu_worker.layers.rope_scaling import RopeParameters, rope_amplitude, rope_angles


def rotary_table(
    parameters: RopeParameters, head_dim: int, max_len: int, device: torch.device, rotary_dim: int | None = None
) -> torch.Tensor:
    """Compute cosines and sines of positions below `max_len`, as `kernels.rope_kv_write` takes them.

    Dimension `i` of a head is paired with dimension `i + head_dim / 2`. Where only `rotary_dim` dimensions turn, pairs
    from `rotary_dim / 2` on stay as they are.
    Source: Su et al., arXiv 2104.09864, equation 34.

    Shapes:
        result: `[max_len, head_dim]` float32, the cosines, then the sines
    """
    turning = rotary_dim or head_dim
    angles = rope_angles(parameters, turning, torch.arange(max_len))
    amplitude = rope_amplitude(parameters)
    table = unrotated_table(head_dim, max_len)
    table[:, : turning // 2] = angles.cos() * amplitude
    table[:, head_dim // 2 : (head_dim + turning) // 2] = angles.sin() * amplitude
    return table.to(device)


def unrotated_table(head_dim: int, max_len: int) -> torch.Tensor:
    """Return the rotations that leave every head as it is, `[max_len, head_dim]` float32."""
    table = torch.zeros(max_len, head_dim)
    table[:, : head_dim // 2] = 1
    return table
