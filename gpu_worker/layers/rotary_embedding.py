"""Rotary position embedding: a table of the rotations of every position, made once."""

from __future__ import annotations

import torch

from gpu_worker.layers.rope_scaling import RopeParameters, rope_amplitude, rope_angles


def rotary_table(parameters: RopeParameters, head_dim: int, max_len: int, device: torch.device) -> torch.Tensor:
    """Compute cosines and sines of positions below `max_len`, as `kernels.rope_kv_write` takes them.

    Dimension `i` of a head is paired with dimension `i + head_dim / 2`.
    Source: Su et al., arXiv 2104.09864, equation 34.

    Shapes:
        result: `[max_len, head_dim]` float32, the cosines, then the sines
    """
    angles = rope_angles(parameters, head_dim, torch.arange(max_len))
    amplitude = rope_amplitude(parameters)
    return torch.cat((angles.cos() * amplitude, angles.sin() * amplitude), dim=-1).to(device)
