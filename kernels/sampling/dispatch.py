"""Chooses the implementation of sampling for the tensors at hand."""

from __future__ import annotations

import torch

from kernels.cpu_library import CpuLibrary, cpu_library
from kernels.cpu_structures import addresses_of
from kernels.gpu_config import gpu_of, is_triton_installed
from kernels.sampling.config import sampling_config
from kernels.sampling.parameters import PenaltyTable, SamplingParameters, TokenScores
from kernels.sampling.reference import (
    apply_penalties_reference,
    count_tokens_reference,
    sample_tokens_reference,
    score_tokens_reference,
)


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


def part_highest(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the highest logit of each row, NaN where there is one, and the first column that has it.

    Shapes:
        logits: `[num_rows, num_columns]` float32
        result: `[num_rows]` float32, `[num_rows]` int64
    """
    if not can_run(logits) or (library := cpu_library()) is None:
        return logits.amax(dim=1), logits.argmax(dim=1)
    highest, columns = torch.empty(len(logits)), torch.empty(len(logits), dtype=torch.int64)
    addresses = addresses_of(logits, highest, columns)
    library.part_highest(*addresses, logits.stride(0), *logits.shape, torch.get_num_threads())
    return highest, columns


def part_masses(logits: torch.Tensor, scales: torch.Tensor, highest: torch.Tensor, least: torch.Tensor) -> torch.Tensor:
    """Return what the columns of each row weigh, without those whose scaled logits are below `least`.

    Shapes:
        logits: `[num_rows, num_columns]` float32
        scales, highest, least: `[num_rows]` float32, contiguous
        result: `[num_rows]` float64
    """
    if not can_run(logits) or (library := cpu_library()) is None:
        return _weights(logits, scales, highest, least).sum(1)
    masses = torch.empty(len(logits), dtype=torch.float64)
    addresses = addresses_of(logits, scales, highest, least, masses)
    library.part_masses(*addresses, logits.stride(0), *logits.shape, torch.get_num_threads())
    return masses


def part_draw(
    logits: torch.Tensor, scales: torch.Tensor, highest: torch.Tensor, least: torch.Tensor, targets: torch.Tensor
) -> torch.Tensor:
    """Return the first column at which the weights of a row sum up to more than its target, else the last with any.

    Shapes:
        targets: `[num_rows]` float64, contiguous; the others as for `part_masses`
        result: `[num_rows]` int64
    """
    if not can_run(logits) or (library := cpu_library()) is None:
        cumulative = _weights(logits, scales, highest, least).cumsum(1)
        # Behind the last column with any weight nothing is added: the first that has all.
        last = torch.searchsorted(cumulative, cumulative[:, -1:].contiguous())
        return torch.searchsorted(cumulative, targets[:, None], right=True).minimum(last)[:, 0]
    columns = torch.empty(len(logits), dtype=torch.int64)
    addresses = addresses_of(logits, scales, highest, least, targets, columns)
    library.part_draw(*addresses, logits.stride(0), *logits.shape, torch.get_num_threads())
    return columns


def _weights(logits: torch.Tensor, scales: torch.Tensor, highest: torch.Tensor, least: torch.Tensor) -> torch.Tensor:
    scaled = (logits - highest[:, None]) * scales[:, None]
    return scaled.double().exp().masked_fill_(scaled < least[:, None], 0.0)
