"""Chooses the implementation of sampling for the tensors at hand."""

from __future__ import annotations

import torch

from kernels.gpu_config import gpu_of, is_triton_installed
from kernels.sampling.config import sampling_config
from kernels.sampling.parameters import PenaltyTable, SamplingParameters
from kernels.sampling.reference import sample_tokens_reference


def sample_tokens(
    logits: torch.Tensor,
    slots: torch.Tensor,
    parameters: SamplingParameters,
    penalties: PenaltyTable | None = None,
    *,
    may_truncate: bool = True,
) -> torch.Tensor:
    """Draw one token a row, without waiting for the device.

    In this order: penalties (repetition, frequency, presence), temperature, `min_p`, `top_k`, `top_p` on what these
    left, renormalised; then the first token, in the order of ids, at which the cumulative probability exceeds the
    uniform number of (seed, position). A row's token depends on nothing but its own logits and parameters, and is the
    one that the CPU's sampler draws. Tokens that tie stand or fall together; the most likely one always stands.

    Args:
        logits: Overwritten when there are penalties. May be strided in its first dimension.
        slots: The slot of each row, each at most once.
        parameters: Of all slots.
        penalties: Of all slots; None when no row has any. What is drawn is added to its counts.
        may_truncate: False promises that no row uses `min_p`, `top_k` or `top_p`, which saves their launches.

    Shapes:
        logits: `[num_rows, vocab_size]` float32
        slots: `[num_rows]` int64
        result: `[num_rows]` int64; `INVALID_TOKEN` where the logits are no distribution.
    """
    if logits.is_cuda and is_triton_installed():
        from kernels.sampling.triton_kernel import sample_tokens_triton

        config = sampling_config(gpu_of(logits.device).generation)
        return sample_tokens_triton(logits, slots, parameters, penalties, may_truncate, config)
    return sample_tokens_reference(logits, slots, parameters, penalties, may_truncate=may_truncate)
