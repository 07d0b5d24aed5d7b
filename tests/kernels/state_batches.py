"""Steps of sequences with a recurrent state: how they are described, and how a sequence is cut into steps."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Values

import torch

from kernels.state_rows import StateRows, StateSaves


def state_rows(
    lengths: Values[int],
    before: Values[int],
    slots: Values[int],
    num_kept: Values[int] | None = None,
    device: torch.device | str = "cpu",
    saves: Values[Values[tuple[int, int]]] | None = None,
) -> StateRows:
    """Describe sequences of `lengths` tokens behind `before` others; a negative number is padding.

    `saves` are, of each sequence, numbers of tokens and slots.
    """
    starts = torch.tensor([0, *lengths]).cumsum(0)
    contexts = [0 if known < 0 else known + length for known, length in zip(before, lengths, strict=True)]
    return StateRows(
        torch.tensor(slots, device=device),
        starts.to(device, torch.int32),
        torch.tensor(contexts, dtype=torch.int32, device=device),
        max(lengths),
        None if num_kept is None else torch.tensor(num_kept, dtype=torch.int32, device=device),
        None if saves is None else state_saves(saves, device),
    )


def state_saves(saves: Values[Values[tuple[int, int]]], device: torch.device | str) -> StateSaves:
    pairs = [pair for of_sequence in saves for pair in of_sequence]
    starts = torch.tensor([0, *map(len, saves)]).cumsum(0)
    counts = torch.tensor([count for count, _ in pairs], dtype=torch.int32, device=device)
    return StateSaves(starts.to(device, torch.int32), counts, torch.tensor([slot for _, slot in pairs], device=device))


def all_splits(length: int) -> Iterator[list[int]]:
    """Yield every way to cut a sequence into steps."""
    for cuts in range(1 << (length - 1)):
        parts, last = [], 0
        for end in range(1, length + 1):
            if end == length or cuts >> (end - 1) & 1:
                parts.append(end - last)
                last = end
        yield parts
