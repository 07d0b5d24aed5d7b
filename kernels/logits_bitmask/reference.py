"""Bitmask of logits in plain torch: the oracle of the kernel, and what runs without a GPU."""

from __future__ import annotations

import torch


def forbid_tokens_reference(logits: torch.Tensor, rows: torch.Tensor, bitmask: torch.Tensor) -> None:
    """Do what `kernels.logits_bitmask.forbid_tokens` promises."""
    token_ids = torch.arange(logits.shape[1], device=logits.device)
    is_allowed = (bitmask[:, token_ids // 32] >> (token_ids % 32)) & 1 > 0
    logits[rows] = logits[rows].masked_fill_(~is_allowed, float("-inf"))
