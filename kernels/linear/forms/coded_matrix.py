"""A quantized matrix as kernels pack it, whichever form it comes from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from kernels.linear.forms.numbers import Number

Activation = Literal["none", "dynamic", "static"]
"""How inputs are rounded before the product: not at all, with a scale a token, or with the checkpoint's own."""


@dataclass(frozen=True, slots=True, eq=False)
class CodedMatrix:
    """A matrix `scale * decoded code + offset`, of which a group of columns of a row shares scale and offset.

    Attributes:
        number: What codes stand for.
        codes: One a byte: `[out_features, in_features]` uint8.
        scales: `[out_features, ceil(in_features / group_size)]` float32.
        offsets: The same shape, float32; None where all are zero.
        group_size: Columns of a group; the last group may have fewer.
        input_order: Column `j` multiplies input feature `input_order[j]`; `[in_features]` int64. None is in order.
        activation: How inputs are rounded, to numbers of the same kind.
        activation_scale: `[]` float32, where it is "static".
    """

    number: Number
    codes: torch.Tensor
    scales: torch.Tensor
    offsets: torch.Tensor | None
    group_size: int
    input_order: torch.Tensor | None = None
    activation: Activation = "none"
    activation_scale: torch.Tensor | None = None
