"""Bitmask of logits by the compiled CPU kernel (`cpu.cpp`)."""

from __future__ import annotations

import torch

from kernels.cpu_library import CpuLibrary


def can_run(logits: torch.Tensor) -> bool:
    """Return True where the kernel supports the type and layout."""
    return logits.is_cpu and logits.dtype is torch.float32 and logits.stride(1) == 1


def forbid_tokens_cpu(library: CpuLibrary, logits: torch.Tensor, rows: torch.Tensor, bitmask: torch.Tensor) -> None:
    """Do what `kernels.logits_bitmask.forbid_tokens` promises."""
    library.forbid_tokens(
        logits.data_ptr(),
        rows.contiguous().data_ptr(),
        bitmask.data_ptr(),
        logits.stride(0),
        bitmask.shape[0],
        logits.shape[1],
    )
