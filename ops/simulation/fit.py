"""Fits the times of steps to what clients of a running system have measured.

Both kinds of measurements are sums in proportion to the work. A gap between two tokens is a step. A time to first
token is the way there and back, and a step for each part of the prompt. Parts that come out negative are left out, so
all stay positive. Errors count relatively: a step of 2 ms that is predicted as 3 is as bad as one of 20 as 30.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ops.simulation.step_time import Chunk, LinearTimes

_NUM_QUANTILES = 101


@dataclass(frozen=True, slots=True)
class Gap:
    """A time between two tokens, while `num_decodes` sequences attended to `num_context` tokens in all."""

    seconds: float
    num_decodes: int
    num_context: int

    @property
    def row(self) -> list[float]:
        """How often each part of `Fit` is in it."""
        return [1.0, float(self.num_decodes), 0.0, float(self.num_context), 0.0, 0.0]


@dataclass(frozen=True, slots=True)
class FirstToken:
    """A time to first token of a prompt that came alone, computed in these parts."""

    seconds: float
    chunks: tuple[Chunk, ...]

    @property
    def row(self) -> list[float]:
        """How often each part of `Fit` is in it."""
        steps = float(len(self.chunks))
        tokens = float(sum(length for _, length in self.chunks))
        pairs = sum(length * start + length * (length + 1) / 2 for start, length in self.chunks)
        return [steps, steps, tokens - steps, 0.0, pairs, 1.0]


@dataclass(frozen=True, slots=True)
class Fit:
    """What was fitted: the parts of a step, and the way of a request there and back."""

    times: LinearTimes
    latency_s: float


def fit(measured: Sequence[Gap | FirstToken]) -> Fit:
    """Fit all parts by least squares of relative errors, none negative."""
    rows = [[value / each.seconds for value in each.row] for each in measured]
    names = list(range(len(rows[0])))
    while True:
        # Columns scaled alike, so that the solver drops none of them as small.
        columns = np.array([[row[name] for name in names] for row in rows])
        scales = np.linalg.norm(columns, axis=0)
        scales[scales == 0] = 1.0
        found = np.linalg.lstsq(columns / scales, np.ones(len(rows)))[0] / scales
        if (found >= 0).all():
            break
        names.remove(names[int(np.argmin(found))])
    parts = [0.0] * len(rows[0])
    for name, value in zip(names, found, strict=True):
        parts[name] = float(value)
    return Fit(LinearTimes(*parts[:5]), parts[5])


def spread(gaps: Sequence[Gap], times: LinearTimes) -> tuple[float, ...]:
    """Return the quantiles of measured over predicted gaps, for `StepTimes`."""
    ratios = sorted(each.seconds / times.seconds(each.num_decodes, each.num_context, ()) for each in gaps)
    last = len(ratios) - 1
    return tuple(round(ratios[round(last * place / (_NUM_QUANTILES - 1))], 4) for place in range(_NUM_QUANTILES))
