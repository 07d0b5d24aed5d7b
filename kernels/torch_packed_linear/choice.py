"""Chooses forms of a matrix by what was measured, and multiplies by the one for a number of rows."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping

import torch

from kernels.torch_packed_linear.form import Form
from kernels.torch_packed_linear.timing import ROWS

# Between the numbers of rows that were measured, in ratios.
_UP_TO = (2, 8, 32)
# How many times as fast another form must be, at some number of rows, for a copy of its own.
_WORTH_A_COPY = 1.25


def choose(seconds: Mapping[str, tuple[float, ...]]) -> tuple[str, ...]:
    """Return which form to use for each number of rows: the best on the whole, unless another is much better there.

    Args:
        seconds: What `measure` returned.
    """
    best = [min(column) for column in zip(*seconds.values(), strict=True)]
    first = min(seconds, key=lambda name: math.prod(s / b for s, b in zip(seconds[name], best, strict=True)))
    chosen = []
    for index, least in enumerate(best):
        is_much_better = seconds[first][index] > _WORTH_A_COPY * least
        chosen.append(min(seconds, key=lambda name: seconds[name][index]) if is_much_better else first)
    return tuple(chosen)


def describe(names: tuple[str, ...], seconds: Mapping[str, tuple[float, ...]]) -> str:
    """Say in one line what was chosen, and why."""
    rows = "/".join(map(str, ROWS))
    times = (f"{name} {'/'.join(f'{s * 1e6:.0f}' for s in values)}" for name, values in seconds.items())
    return f"{'/'.join(names)} for {rows} rows (microseconds: {', '.join(times)})"


class RowForms:
    """A matrix in the forms that were chosen for numbers of rows."""

    __slots__ = ("_forms",)

    def __init__(self, forms: tuple[Form, ...]) -> None:
        """Hold a form for each number of rows that was measured; the same one may occur more than once."""
        self._forms = forms

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply rows."""
        return self._forms[bisect_left(_UP_TO, x.shape[0])](x)
