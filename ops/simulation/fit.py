"""Fits the times of steps to measured ones, as sums in proportion to the work.

No part is negative. Errors count relatively: a step of 2 ms that is predicted as 3 is as bad as one of 20 as 30. The
sum of their absolute values is minimized, so that the few steps that something else has delayed change little: `spread`
has them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ops.simulation.step_time import HostTimes, LinearTimes, Spread, StepTimes, StepWork

_NUM_QUANTILES = 101
_ITERATIONS = 20
_SMALL = 0.01
_MOST_FREE_TOKENS = 16


class MeasuredStep(NamedTuple):
    """A step's work, its seconds on the device, and the host's seconds until the next step could begin."""

    work: StepWork
    device_s: float
    host_s: float


def fit(steps: Sequence[MeasuredStep]) -> StepTimes:
    """Fit the device's and the host's parts, and the spread of steps."""
    device, cold_s = _fit_device(steps)
    host = fit_host([(step.work.num_sequences, bool(step.work.chunks), step.host_s) for step in steps])
    times = StepTimes(device, host, cold_s=cold_s)
    return replace(times, spread=spread_of(steps, times))


def spread_of(steps: Sequence[MeasuredStep], times: StepTimes) -> Spread:
    """Return the spread of measured over predicted step times."""
    decodes = [step for step in steps if not step.work.chunks]
    prompts = [step for step in steps if step.work.chunks]
    return Spread(_quantiles(decodes, times), _quantiles(prompts, times))


def fit_host(measured: Sequence[tuple[int, bool, float]]) -> HostTimes:
    """Fit the host's time between steps: from sequences, whether there were prompt chunks, and seconds."""
    rows = np.array([[1.0, count, has_prompts] for count, has_prompts, _ in measured])
    return HostTimes(*_parts(rows, np.array([seconds for *_, seconds in measured])).tolist())


def _fit_device(steps: Sequence[MeasuredStep]) -> tuple[LinearTimes, float]:
    """Return the device's parts, and what cold caches cost: with the free tokens by which errors are least."""
    seconds = np.array([step.device_s for step in steps])
    rows = [_row(step.work) for step in steps]
    fits = []
    for free_tokens in range(_MOST_FREE_TOKENS + 1):
        table = np.array([[*row[:2], max(0.0, row[2] - free_tokens), *row[3:]] for row in rows])
        parts = _parts(table, seconds)
        fits.append((float(np.abs(table @ parts / seconds - 1).sum()), free_tokens, parts.tolist()))
    _, free_tokens, (fixed_s, sequence_s, token_s, context_s, pair_s, cold_s) = min(fits)
    return LinearTimes(fixed_s, sequence_s, token_s, context_s, pair_s, free_tokens), cold_s


def _row(work: StepWork) -> list[float]:
    num_tokens = work.num_decodes + sum(length for _, length in work.chunks)
    pairs = sum(length * start + length * (length + 1) / 2 for start, length in work.chunks)
    return [1.0, float(work.num_sequences), float(num_tokens), float(work.num_context), pairs, work.coldness]


def _parts(table: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Return the coefficients with the least sum of relative errors of the seconds; 0 for a column that no row uses."""
    measured = np.maximum(seconds, 1e-9)
    weights = 1 / measured
    parts = np.zeros(table.shape[1])
    for _ in range(_ITERATIONS):
        parts = _least_squares(table * weights[:, None], measured * weights)
        predicted = np.maximum(table @ parts, 1e-9)
        # Reweighted least squares: a square over its own root is the absolute value.
        weights = 1 / predicted / np.sqrt(np.maximum(np.abs(measured / predicted - 1), _SMALL))
    return parts


def _least_squares(table: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Solve with no part negative."""
    # Columns scaled alike, so that the solver drops none of them as small.
    scales = np.linalg.norm(table, axis=0)
    names = [place for place in range(len(scales)) if scales[place] > 0]
    parts = np.zeros(len(scales))
    while names:
        found = np.linalg.lstsq(table[:, names] / scales[names], wanted)[0] / scales[names]
        if (found >= 0).all():
            parts[names] = found
            break
        del names[int(np.argmin(found))]
    return parts


def _quantiles(steps: Sequence[MeasuredStep], times: StepTimes) -> tuple[float, ...]:
    """Return the quantiles of measured over predicted time; none without steps."""
    ratios = [(step.device_s + step.host_s) / times.seconds(step.work)[1] for step in steps]
    return (
        tuple(round(float(each), 4) for each in np.quantile(ratios, np.linspace(0, 1, _NUM_QUANTILES)))
        if ratios
        else ()
    )
