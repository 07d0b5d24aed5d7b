"""Rotary position embedding: a table of cos and sin made once, a look-up per step, a rotation per layer."""

from __future__ import annotations

import torch

from gpu_worker.layers.rope_scaling import RopeParameters, rope_amplitude, rope_angles


class RotaryEmbedding:
    """Holds cos and sin of every position.

    Dimension `i` of a head is paired with dimension `i + head_dim / 2`.
    Source: Su et al., arXiv 2104.09864, equation 34.
    """

    __slots__ = ("_dtype", "_table")

    def __init__(
        self, parameters: RopeParameters, head_dim: int, max_len: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Compute the table in float32 for positions below `max_len`; rotations are applied in `dtype`."""
        angles = rope_angles(parameters, head_dim, torch.arange(max_len))
        amplitude = rope_amplitude(parameters)
        table = torch.cat((angles.cos() * amplitude, angles.sin() * amplitude), dim=-1)
        self._table = table.to(device=device, dtype=dtype)

    def __call__(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Look up the rotations of a step, for `rotate()` in every layer.

        Shapes:
            positions: `[num_tokens]`, each below the table's length
            result: cos and signed sin, each `[num_tokens, 1, head_dim]`
        """
        cos, sin = self._table.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)
        return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def rotate(heads: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> torch.Tensor:
    """Rotate each head by its token's position.

    Shapes:
        heads, result: `[num_tokens, num_heads, head_dim]`
        cos, signed_sin: `[num_tokens, 1, head_dim]`
    """
    swapped = heads.roll(heads.shape[-1] // 2, -1)
    return torch.addcmul(heads * cos, swapped, signed_sin)
