"""What a linear layer of 8-bit integers is made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch


@dataclass(frozen=True, slots=True, eq=False)
class Int8GroupWeight:
    """A matrix `scale * q + offset`.

    Attributes:
        values: `[out_features, in_features]` uint8.
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


@dataclass(frozen=True, slots=True, eq=False)
class Int8Weight:
    """A matrix `scale * q`.

    Attributes:
        values: `[out_features, in_features]` int8.
        scales: `[out_features, 1]` float32, or `[1, 1]`.
        activation: Whether inputs are quantized too: with a scale a token, or with `activation_scale`.
        activation_scale: `[]` float32.
    """

    values: torch.Tensor
    scales: torch.Tensor
    activation: Literal["none", "dynamic", "static"] = "none"
    activation_scale: torch.Tensor | None = None
