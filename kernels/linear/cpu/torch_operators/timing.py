"""Measures how long forms of a matrix take, after a check that they multiply what the plain formula does.

An operator may be missing, refuse a shape, or be wrong on a processor: where there are no instructions for it, products
of bytes saturate as they are added. Such a form is left out.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping

import torch

from kernels.linear.cpu.torch_operators.form import Form

ROWS = (1, 4, 16, 64)
"""The numbers of rows that are measured."""

FORMULA = "formula"

# Of the formula's result, in norm: what rounding to bfloat16 leaves is a third of it.
_LEEWAY = 0.01
# A form that is this many times slower than another is not measured with more rows.
_HOPELESS = 8
_REPEATS = 5
_ENOUGH_S = 0.01
# Weights are read from memory in a step: caches hold something else before each call.
_FLUSHED_BYTES = 48 << 20


def measure(
    makers: Mapping[str, Callable[[], Form]],
    formula: Form,
    in_features: int,
    dtype: torch.dtype,
    largest_input: float = 1.0,
) -> dict[str, tuple[float, ...]]:
    """Return the seconds of each form that works, for each number of `ROWS`; infinity where it is hopeless.

    Args:
        makers: Make the forms, by their names.
        formula: What is right. Where no form works it is the only one, as `FORMULA`.
        in_features: Features of a row.
        dtype: Type of the rows.
        largest_input: Of the check, which is to find products that saturate.
    """
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(rows, in_features, generator=generator).to(dtype) for rows in ROWS]
    trial = torch.cat((torch.ones_like(inputs[0]), inputs[1])) * largest_input
    right = formula(trial).float()
    flushed = torch.ones(_FLUSHED_BYTES // 4)
    forms = {name: form for name, make in makers.items() if (form := _working(make, trial, right)) is not None}
    forms = forms or {FORMULA: formula}
    seconds: dict[str, list[float]] = {name: [] for name in forms}
    for x in inputs:
        best = math.inf
        for name, form in forms.items():
            is_hopeless = bool(seconds[name]) and seconds[name][-1] == math.inf
            taken = math.inf if is_hopeless else _seconds(form, x, flushed)
            best = min(best, taken)
            seconds[name].append(taken)
        for values in seconds.values():
            if values[-1] > _HOPELESS * best:
                values[-1] = math.inf
    return {name: tuple(values) for name, values in seconds.items()}


def _working(make: Callable[[], Form], trial: torch.Tensor, right: torch.Tensor) -> Form | None:
    try:
        form = make()
        difference = form(trial).float() - right
    except (AttributeError, RuntimeError):
        return None
    return form if difference.norm() <= _LEEWAY * right.norm() else None


def _seconds(form: Form, x: torch.Tensor, flushed: torch.Tensor) -> float:
    """Return the processor time of this thread, which does its share: not that of others on the machine."""
    form(x)
    best = math.inf
    for _ in range(_REPEATS):
        flushed.sum()
        start = time.thread_time()
        form(x)
        best = min(best, time.thread_time() - start)
        if best > _ENOUGH_S:
            break
    return best
