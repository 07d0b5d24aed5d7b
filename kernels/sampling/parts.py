"""Sampling where some columns of the logits are here and the others elsewhere: what can be said of the own ones.

Weights are those of `sample_tokens`: `exp((logit - highest) * scale)`, by the highest logit of the whole row.
"""

from __future__ import annotations

import torch

from kernels.cpu_library import cpu_library
from kernels.cpu_structures import addresses_of
from kernels.sampling.cpu import can_run


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
