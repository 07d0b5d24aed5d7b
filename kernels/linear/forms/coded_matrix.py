"""A quantized matrix as kernels pack it, whichever form it comes from."""

from __future__ import annotations

from collections.abc import Iterator
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


def column_groups(matrix: torch.Tensor, group_size: int) -> Iterator[tuple[torch.Tensor, slice]]:
    """Yield views of a matrix as groups of columns, and which groups they are: all whole ones, then one with fewer.

    Shapes:
        matrix: `[rows, columns]`
        view: `[rows, num_groups, group_size or fewer]`
    """
    rows, columns = matrix.shape
    num_whole = columns // group_size
    end = num_whole * group_size
    yield matrix[:, :end].view(rows, num_whole, group_size), slice(num_whole)
    if end < columns:
        yield matrix[:, end:].view(rows, 1, columns - end), slice(num_whole, num_whole + 1)


def is_same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    """Return True for equal tensors, and where neither is given."""
    if one is None or other is None:
        return one is other
    return torch.equal(one, other)
