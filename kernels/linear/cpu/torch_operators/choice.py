"""Chooses forms of a matrix by what was measured, and multiplies by the one for a number of rows."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Collection, Mapping

import torch

from kernels.linear.cpu.torch_operators.form import Form
from kernels.linear.cpu.torch_operators.timing import ROWS

# Between the numbers of rows that were measured, in ratios.
_UP_TO = (2, 8, 32)
# How many times as fast a form must be for a copy of its own, or for one that is larger than what was loaded.
_WORTH_A_COPY = 1.25


def choose(seconds: Mapping[str, tuple[float, ...]], larger: Collection[str] = ()) -> tuple[str, ...]:
    """Return which form to use for each number of rows: the best on the whole, unless another is much better there.

    Args:
        seconds: What `measure` returned.
        larger: Forms that take more memory than what was loaded.
    """

    def on_the_whole(name: str) -> float:
        """Return the geometric mean, with a handicap for memory."""
        return math.prod(seconds[name]) ** (1 / len(ROWS)) * (_WORTH_A_COPY if name in larger else 1)

    first, chosen = min(seconds, key=on_the_whole), []
    for index in range(len(ROWS)):
        fastest = min(seconds, key=lambda name: seconds[name][index])
        is_much_better = seconds[first][index] > _WORTH_A_COPY * seconds[fastest][index]
        chosen.append(fastest if is_much_better else first)
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
