"""Chooses an entry of a launch table: the fastest, over the shapes that matter, of those that are right."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from statistics import geometric_mean

import torch

from kernels.gpu_config import GpuGeneration
from ops.bench.gpu.case import OURS, Case, Entry, Op, Shapes
from ops.bench.gpu.run import poisoned_memory, reason_of
from ops.bench.gpu.timer import Timer

# The present entry stays unless another one is faster by more than measurements differ.
_LEAST_GAIN = 0.01


@dataclass(frozen=True, slots=True)
class Tuning:
    """One entry of a table.

    Attributes:
        table: Its name.
        key: Of the entry among those of a generation; None where a generation has one entry.
        present: The entry that a generation has.
        candidates: To choose from, beside the present entry.
        op: That an entry launches.
        checked: Shapes at which an entry must be right.
        timed: Shapes at which the right ones are compared.
    """

    table: str
    key: int | None
    present: Callable[[GpuGeneration], Entry]
    candidates: tuple[Entry, ...]
    op: Op
    checked: Shapes
    timed: Shapes

    @property
    def label(self) -> str:
        """Say which entry."""
        return self.table if self.key is None else f"{self.table}[{self.key}]"


@dataclass(slots=True)
class Trial:
    """What became of an entry: its seconds by problem, or why it is out.

    Attributes:
        score: Geometric mean, over the problems, of its time over the best time of any entry.
    """

    entry: Entry
    seconds: list[float] = field(default_factory=list)
    failure: str | None = None
    score: float = math.inf


@dataclass(frozen=True, slots=True)
class Choice:
    """The entry that is best, and all that were tried, the present one first."""

    entry: Entry
    trials: list[Trial]


def choose(tuning: Tuning, present: Entry, device: torch.device, timer: Timer) -> Choice:
    """Check and time every candidate; `RuntimeError` if none is right, the present one included."""
    trials = [Trial(present), *(Trial(entry) for entry in tuning.candidates if dict(entry) != dict(present))]
    for trial in trials:
        trial.failure = _first_failure(tuning, device, trial.entry)
    right = [trial for trial in trials if trial.failure is None]
    for problem in tuning.op.cases(tuning.timed) if right else ():
        case = problem.build(device)
        for trial in right:
            if trial.failure is None:
                _time(problem.label, case, trial, timer)
    right = [trial for trial in right if trial.failure is None]
    if not right:
        raise RuntimeError(f"{tuning.label}: no entry is right; the present one: {trials[0].failure}")
    bests = [min(times) for times in zip(*(trial.seconds for trial in right), strict=True)]
    for trial in right:
        trial.score = geometric_mean(s / best_s for s, best_s in zip(trial.seconds, bests, strict=True))
    best = min(right, key=lambda trial: trial.score)
    keeps = trials[0].failure is None and trials[0].score <= best.score * (1 + _LEAST_GAIN)
    return Choice(present if keeps else best.entry, trials)


def _first_failure(tuning: Tuning, device: torch.device, entry: Entry) -> str | None:
    try:
        for check in tuning.op.checks(device, tuning.checked, entry=entry):
            with poisoned_memory():
                error = check.measure()
            # NaN is not right either.
            if not error <= check.tolerance:
                return f"wrong at {check.label}: {error:.2e} of {check.tolerance:.0e}"
    except Exception as error:  # too much shared memory, usually
        return reason_of(error)
    return None


def _time(label: str, case: Case, trial: Trial, timer: Timer) -> None:
    try:
        trial.seconds.append(timer.measure(partial(case.candidates[OURS], entry=trial.entry), case.num_sets).seconds)
    except Exception as error:  # a shape of the problem that the checks do not have
        trial.failure = f"{label}: {reason_of(error)}"
