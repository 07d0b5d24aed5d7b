"""Makes the engine's form of integers that share a scale and a zero point a group: `w = scale * (q - zero)`."""

from __future__ import annotations

import torch

from kernels.linear.forms import GroupQuantizedWeight, integers


def unpack_words(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the values, lowest bits first: `[rows, columns * 32 / bits]` uint8, of `words: [rows, columns]` int32."""
    return integers(bits).unpack(words.contiguous().view(torch.uint8))


def group_weight(
    values: torch.Tensor,
    bits: int,
    group_size: int,
    scales: torch.Tensor,
    zeros: torch.Tensor | int,
    input_order: torch.Tensor | None = None,
) -> GroupQuantizedWeight:
    """Put a matrix into the engine's form.

    Shapes:
        values: `[out_features, in_features * bits / 8]` uint8, packed as in `GroupQuantizedWeight`, in input order
        scales, zeros: `[out_features, num_groups]`; zeros may be one integer for all
        input_order: `[in_features]` int64, puts columns of a group beside one another
    """
    number = integers(bits)
    if input_order is not None:
        values = number.pack(number.unpack(values)[:, input_order])
    # Subtracted from zero, not negated: a zero point of zero must not become a negative zero.
    offsets = 0 - scales * zeros
    return GroupQuantizedWeight(values.contiguous(), number, group_size, scales, offsets, input_order)


def columns_of_a_group(group_size: int, in_features: int) -> int:
    """Return how many columns share a scale, where a `group_size` of -1 means all."""
    return in_features if group_size == -1 else min(group_size, in_features)
