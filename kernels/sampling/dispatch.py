"""Chooses the implementation of sampling for the tensors at hand."""

from __future__ import annotations

import torch

from kernels.cpu_library import cpu_library
from kernels.gpu_config import gpu_of, is_triton_installed
from kernels.sampling.config import sampling_config
from kernels.sampling.cpu import apply_penalties_cpu, can_run, count_tokens_cpu, sample_tokens_cpu, score_tokens_cpu
from kernels.sampling.parameters import PenaltyTable, SamplingParameters, TokenScores
from kernels.sampling.reference import (
    apply_penalties_reference,
    count_tokens_reference,
    sample_tokens_reference,
    score_tokens_reference,
)


def sample_tokens(
    logits: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    parameters: SamplingParameters,
    *,
    may_truncate: bool = True,
    marks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Draw one token a row, without waiting for the device.

    In this order: temperature, `min_p`, `top_k`, `top_p` on what these left, renormalised; then the first token, in the
    order of ids, at which the cumulative probability exceeds the uniform number of (seed, position). A row's token
    depends on nothing but its own logits and parameters, and is the same on every device. Tokens that tie stand or fall
    together; the most likely one always stands. A row with a mark draws, of the tokens that stand, the one with the
    highest sum of scaled logit and Gumbel noise that its mark decides (`kernels.sampling.reference`).

    Args:
        logits: May be strided in its first dimension.
        slots: The slot of each row.
        positions: The number of tokens in the output before the one that each row draws: the counter of the random
            numbers.
        parameters: Of all slots.
        may_truncate: False promises that no row uses `min_p`, `top_k` or `top_p`, which saves their launches.
        marks: Of watermarked rows, 0 of others; None without any.

    Shapes:
        logits: `[num_rows, vocab_size]` float32
        slots: `[num_rows]` int64
        positions: `[num_rows]` int64
        marks: `[num_rows]` int64
        result: `[num_rows]` int64; `INVALID_TOKEN` where the logits are not a distribution.
    """
    if logits.is_cuda and is_triton_installed():
        from kernels.sampling.triton_kernel import sample_tokens_triton

        config = sampling_config(gpu_of(logits.device).generation)
        return sample_tokens_triton(logits, slots, positions, parameters, may_truncate, config, marks)
    if can_run(logits) and (library := cpu_library()) is not None:
        return sample_tokens_cpu(library, logits, slots, positions, parameters, may_truncate, marks)
    return sample_tokens_reference(logits, slots, positions, parameters, may_truncate=may_truncate, marks=marks)


def apply_penalties(
    logits: torch.Tensor, slots: torch.Tensor, penalties: PenaltyTable, drafts: torch.Tensor | None = None
) -> None:
    """Penalise logits in place: repetition first, then frequency, then presence.

    Args:
        logits: Overwritten. May be strided in its first dimension.
        slots: The slot of each row.
        penalties: Of all slots.
        drafts: Tokens that each row counts as if they were in the output, filled up with -1; None without any.

    Shapes:
        logits: `[num_rows, vocab_size]` float32
        slots: `[num_rows]` int64
        drafts: `[num_rows, max_drafts]` int64, contiguous
    """
    if logits.is_cuda and is_triton_installed():
        from kernels.sampling.triton_kernel import apply_penalties_triton

        apply_penalties_triton(logits, slots, penalties, drafts)
    elif can_run(logits) and (library := cpu_library()) is not None:
        apply_penalties_cpu(library, logits, slots, penalties, drafts)
    else:
        apply_penalties_reference(logits, slots, penalties, drafts)


def count_tokens(penalties: PenaltyTable, slots: torch.Tensor, token_ids: torch.Tensor) -> None:
    """Add tokens to the outputs that penalties look at.

    Args:
        penalties: Of all slots.
        slots: The slot of each token. May repeat.
        token_ids: Negative ones are left out.

    Shapes:
        slots: `[num_tokens]` int64
        token_ids: `[num_tokens]` int64
    """
    if token_ids.is_cuda and is_triton_installed():
        from kernels.sampling.triton_kernel import count_tokens_triton

        count_tokens_triton(penalties, slots, token_ids)
    elif token_ids.is_cpu and (library := cpu_library()) is not None:
        count_tokens_cpu(library, penalties, slots, token_ids)
    else:
        count_tokens_reference(penalties, slots, token_ids)


def score_tokens(logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> TokenScores:
    """Return the log probability of one token a row, and of the `num_top` most likely ones, without waiting.

    Args:
        logits: As the model computed them. May be strided in its first dimension.
        token_ids: One a row, each in the vocabulary.
        num_top: Is cut down to the size of the vocabulary.

    Shapes:
        logits: `[num_rows, vocab_size]` float32
        token_ids: `[num_rows]` int64
    """
    if can_run(logits) and (library := cpu_library()) is not None:
        return score_tokens_cpu(library, logits, token_ids, num_top)
    return score_tokens_reference(logits, token_ids, num_top)
