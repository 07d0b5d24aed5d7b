"""Columns of a matrix in groups, and their order."""

from __future__ import annotations

from collections.abc import Iterator

import torch


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
