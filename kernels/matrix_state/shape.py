"""The sizes of the states of a layer."""

from __future__ import annotations

from typing import NamedTuple


class MatrixShape(NamedTuple):
    """The shape of a sequence's state: for each head `key_dim` rows and `value_dim` columns."""

    num_heads: int
    key_dim: int
    value_dim: int
