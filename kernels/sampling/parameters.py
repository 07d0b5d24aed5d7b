"""The sampler's parameters for each sequence: one slot a sequence, kept on the device while it runs.

The rows of a batch name their slots, so nothing is gathered or copied when sequences come and go, nor when a sequence
has several rows because it verifies drafts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

# Drawn for a row whose logits hold NaN or +inf, or whose tokens are all forbidden.
INVALID_TOKEN = -1


class SamplingParameters(NamedTuple):
    """Per slot, `[num_slots]` each, contiguous.

    Attributes:
        inverse_temperature: float32; 0 takes the most likely token, the first of several.
        log_min_p: float32, logarithm of `min_p`; minus infinity keeps all.
        top_k: int32; 0 keeps all.
        top_p: float32; 1 keeps all.
        seed: int64, the key of the random numbers.
    """

    inverse_temperature: torch.Tensor
    log_min_p: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    seed: torch.Tensor


class PenaltyTable(NamedTuple):
    """Penalties of each slot, and the tokens they look at. `count_tokens` adds tokens.

    Attributes:
        repetition: `[num_slots]` float32; 1 does nothing.
        frequency: `[num_slots]` float32; 0 does nothing.
        presence: `[num_slots]` float32; 0 does nothing.
        output_counts: `[num_slots, vocab_size]` int32, occurrences in the output.
        seen_bits: `[num_slots, ceil(vocab_size / 32)]` int32; bit `t % 32` of word `t // 32` says whether token `t`
            occurs in the prompt or in the output. `output_counts` is read only where the bit is set.
    """

    repetition: torch.Tensor
    frequency: torch.Tensor
    presence: torch.Tensor
    output_counts: torch.Tensor
    seen_bits: torch.Tensor


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Log probabilities of one token a row and of the most likely ones.

    Attributes:
        chosen: `[num_rows]` float32.
        top_ids: `[num_rows, num_top]` int64, most likely first.
        top_values: `[num_rows, num_top]` float32.
    """

    chosen: torch.Tensor
    top_ids: torch.Tensor
    top_values: torch.Tensor
