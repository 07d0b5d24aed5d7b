"""What a linear layer of 4-bit integers is made of."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, eq=False)
class Int4Weight:
    """A matrix `scale * q + offset`.

    Attributes:
        values: Two columns a byte, the even one in the low half: `[out_features, in_features / 2]` uint8.
        scales: `[out_features, ceil(in_features / group_size)]` float32.
        offsets: The same shape, float32.
        group_size: Columns of a group; the last group may have fewer.
        input_order: Column `j` multiplies input feature `input_order[j]`; `[in_features]` int64. None is in order.
    """

    values: torch.Tensor
    scales: torch.Tensor
    offsets: torch.Tensor
    group_size: int
    input_order: torch.Tensor | None = None
