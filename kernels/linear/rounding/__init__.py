"""Inputs of linear layers, rounded to eight bits: by a kernel of their own, or at the end of the one before."""

from __future__ import annotations

import torch

from kernels.linear.rounding.rows import ROW_MULTIPLE, InputRounding, RoundedRows, Rows, common_rounding


def round_rows(x: torch.Tensor, rounding: InputRounding) -> RoundedRows:
    """Round rows `[num_rows, in_features]`, on a GPU and contiguous in their last dimension."""
    from kernels.linear.rounding.triton_kernel import quantize_tokens_triton

    return quantize_tokens_triton(x, rounding)


__all__ = ["ROW_MULTIPLE", "InputRounding", "RoundedRows", "Rows", "common_rounding", "round_rows"]
