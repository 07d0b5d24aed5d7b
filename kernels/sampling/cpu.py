"""Sampling by the compiled CPU kernels (`cpu.cpp`): a greedy row is read once, a drawn one twice, none is sorted."""

from __future__ import annotations

import torch

from kernels.cpu_library import CpuLibrary
from kernels.cpu_structures import addresses_of
from kernels.sampling.parameters import PenaltyTable, SamplingParameters, TokenScores


def can_run(logits: torch.Tensor) -> bool:
    """Return True where the kernels support the type and layout."""
    return logits.is_cpu and logits.dtype is torch.float32 and logits.stride(1) == 1


def sample_tokens_cpu(
    library: CpuLibrary,
    logits: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    parameters: SamplingParameters,
    may_truncate: bool,
    marks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Do what `kernels.sampling.sample_tokens` promises."""
    slots, positions = slots.contiguous(), positions.contiguous()
    marks = None if marks is None else marks.contiguous()
    token_ids = torch.empty(logits.shape[0], dtype=torch.int64)
    addresses = addresses_of(logits, slots, positions, *parameters, marks, token_ids)
    library.sample_tokens(*addresses, logits.stride(0), *logits.shape, may_truncate, torch.get_num_threads())
    return token_ids


def apply_penalties_cpu(
    library: CpuLibrary, logits: torch.Tensor, slots: torch.Tensor, penalties: PenaltyTable, drafts: torch.Tensor | None
) -> None:
    """Do what `kernels.sampling.apply_penalties` promises."""
    slots = slots.contiguous()
    num_drafts = 0 if drafts is None else drafts.shape[1]
    library.penalise(*addresses_of(logits, slots, *penalties, drafts), logits.stride(0), num_drafts, *logits.shape)


def count_tokens_cpu(
    library: CpuLibrary, penalties: PenaltyTable, slots: torch.Tensor, token_ids: torch.Tensor
) -> None:
    """Do what `kernels.sampling.count_tokens` promises."""
    slots, token_ids = slots.contiguous(), token_ids.contiguous()
    counts = penalties.output_counts
    addresses = addresses_of(counts, penalties.seen_bits, slots, token_ids)
    library.count_tokens(*addresses, len(token_ids), counts.shape[1])


def score_tokens_cpu(library: CpuLibrary, logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> TokenScores:
    """Do what `kernels.sampling.score_tokens` promises."""
    num_rows, vocab_size = logits.shape
    token_ids, num_top = token_ids.contiguous(), min(num_top, vocab_size)
    chosen = torch.empty(num_rows, dtype=torch.float32)
    top_ids = torch.empty(num_rows, num_top, dtype=torch.int64)
    top_values = torch.empty(num_rows, num_top, dtype=torch.float32)
    addresses = addresses_of(logits, token_ids, chosen, top_ids, top_values)
    library.score_tokens(*addresses, logits.stride(0), *logits.shape, num_top, torch.get_num_threads())
    return TokenScores(chosen, top_ids, top_values)
