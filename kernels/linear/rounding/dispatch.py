"""Rounds rows by a launch of its own."""

from __future__ import annotations

import torch

from kernels.linear.rounding.rows import InputRounding, RoundedRows


def round_rows(x: torch.Tensor, rounding: InputRounding) -> RoundedRows:
    """Round rows `[num_rows, in_features]`, on a GPU and contiguous in their last dimension."""
    from kernels.linear.rounding.triton_kernel import quantize_tokens_triton

    return quantize_tokens_triton(x, rounding)
