"""Chooses the implementation of the bitmask for the tensors at hand."""

from __future__ import annotations

import torch

from kernels.cpu_library import CpuLibrary, cpu_library
from kernels.cpu_structures import addresses_of
from kernels.gpu_config import is_triton_installed


def forbid_tokens_reference(logits: torch.Tensor, rows: torch.Tensor, bitmask: torch.Tensor) -> None:
    """Do what `kernels.logits_bitmask.forbid_tokens` promises."""
    token_ids = torch.arange(logits.shape[1], device=logits.device)
    is_allowed = (bitmask[:, token_ids // 32] >> (token_ids % 32)) & 1 > 0
    logits[rows] = logits[rows].masked_fill_(~is_allowed, float("-inf"))


def can_run(logits: torch.Tensor) -> bool:
    """Return True where the kernel supports the type and layout."""
    return logits.is_cpu and logits.dtype is torch.float32 and logits.stride(1) == 1


def forbid_tokens_cpu(library: CpuLibrary, logits: torch.Tensor, rows: torch.Tensor, bitmask: torch.Tensor) -> None:
    """Do what `kernels.logits_bitmask.forbid_tokens` promises."""
    rows = rows.contiguous()
    library.forbid_tokens(*addresses_of(logits, rows, bitmask), logits.stride(0), bitmask.shape[0], logits.shape[1])


def forbid_tokens(logits: torch.Tensor, rows: torch.Tensor, bitmask: torch.Tensor) -> None:
    """Set the logits of forbidden tokens to minus infinity, in place.

    Args:
        logits: May be strided in its first dimension.
        rows: The row of the logits that each mask is for, each at most once.
        bitmask: Bit `t % 32` of word `t // 32` allows token `t`. Bits past the vocabulary mean nothing.

    Shapes:
        logits: `[num_rows, vocab_size]` floating point
        rows: `[num_masks]` int64
        bitmask: `[num_masks, ceil(vocab_size / 32)]` int32, contiguous
    """
    if logits.is_cuda and is_triton_installed():
        from kernels.logits_bitmask.triton_kernel import forbid_tokens_triton

        forbid_tokens_triton(logits, rows, bitmask)
        return
    if can_run(logits) and (library := cpu_library()) is not None:
        forbid_tokens_cpu(library, logits, rows, bitmask)
        return
    forbid_tokens_reference(logits, rows, bitmask)
