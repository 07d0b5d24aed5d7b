"""Which states and inputs the compiled CPU kernels take (`columns.h`)."""

from __future__ import annotations

import torch

from kernels.cpu_library import DTYPE_NUMBERS

MAX_KEY_DIM = 256
"""`kMaxKeyDim` of columns.h."""


def can_run(features: torch.Tensor, gates: torch.Tensor, states: torch.Tensor) -> bool:
    """Return True where the kernels support the types, sizes and layouts.

    Shapes:
        features, gates: `[num_tokens, ...]`
        states: `[num_slots, num_heads, key_dim, value_dim]`
    """
    return (
        features.is_cpu
        and features.dtype in DTYPE_NUMBERS
        and features.dtype is gates.dtype
        and features.stride(1) == gates.stride(1) == 1
        and states.dtype is torch.float32
        and states.is_contiguous()
        and states.shape[2] <= MAX_KEY_DIM
    )
