"""One suite's run: its checks, then its cases; a failing peer stops nobody."""

from __future__ import annotations

import gc
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from ops.bench.gpu.case import OURS, OURS_ON_DEVICE, Case, CaseSpec, Clock, OpSuite
from ops.bench.gpu.ceilings import Ceilings
from ops.bench.gpu.timer import Timer, Timing


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One check: its error, or why it did not finish."""

    op: str
    label: str
    error: float | None
    tolerance: float
    failure: str | None = None

    @property
    def is_right(self) -> bool:
        """Return True where the op equals its oracle. NaN does not."""
        return self.error is not None and self.error <= self.tolerance


@dataclass(frozen=True, slots=True)
class CaseResult:
    """One case: the time of each candidate that ran, and why the others did not."""

    op: str
    label: str
    floor_s: float
    timings: dict[str, Timing]
    failures: dict[str, str] = field(default_factory=dict)
    num_tokens: int = 0

    @property
    def fraction(self) -> float | None:
        """Return the share of the ceiling that ours reaches."""
        return self.floor_s / self.timings[OURS].seconds if OURS in self.timings else None

    @property
    def idle_share(self) -> float | None:
        """Return the share of a whole step in which the device has nothing to do."""
        if OURS not in self.timings or OURS_ON_DEVICE not in self.timings:
            return None
        return 1 - self.timings[OURS_ON_DEVICE].seconds / self.timings[OURS].seconds

    @property
    def tokens_per_s(self) -> float | None:
        """Return the tokens that ours makes a second, where that says something."""
        return self.num_tokens / self.timings[OURS].seconds if self.num_tokens and OURS in self.timings else None

    @property
    def best_baseline(self) -> str | None:
        """Return the fastest candidate that is not ours."""
        others = [name for name in self.timings if not name.startswith(OURS)]
        return min(others, key=lambda name: self.timings[name].seconds, default=None)


def check_op(op: OpSuite, device: torch.device) -> list[CheckResult]:
    """Compare an op with its oracles, its outputs poisoned."""
    try:
        checks = op.checks(device)
    except Exception as error:  # an op that cannot be set up is wrong, and the others go on
        return [CheckResult(op.name, "set-up", None, 0.0, reason_of(error))]
    results = []
    for check in checks:
        try:
            with poisoned_memory():
                measured, failure = check.measure(), None
        except Exception as error:  # what a kernel raises is the result
            measured, failure = None, reason_of(error)
        results.append(CheckResult(op.name, check.label, measured, check.tolerance, failure))
    return results


def time_op(
    op: OpSuite, device: torch.device, timer: Timer, ceilings: Ceilings, deadline: float
) -> Iterator[CaseResult]:
    """Time the cases of an op, until the deadline on the monotonic clock."""
    for spec in op.cases:
        if time.monotonic() > deadline:
            yield CaseResult(op.name, spec.label, 0.0, {}, {OURS: "out of time"})
        else:
            yield _time_case(op.name, spec, device, timer, ceilings, deadline)
        # What a failure's traceback or a cycle still holds would be missing to the next case.
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _time_case(
    op: str, spec: CaseSpec, device: torch.device, timer: Timer, ceilings: Ceilings, deadline: float
) -> CaseResult:
    try:
        case = spec.build(device)
    except Exception as error:  # usually too little memory
        return CaseResult(op, spec.label, 0.0, {}, {OURS: reason_of(error)})
    timings: dict[str, Timing] = {}
    failures = dict(case.unavailable)
    for name, call in case.candidates.items():
        if timings and time.monotonic() > deadline:
            failures[name] = "out of time"
            continue
        try:
            timings[name] = _time_candidate(case, name, call, timer)
        except Exception as error:  # a peer that cannot do this shape
            failures[name] = reason_of(error)
    return CaseResult(op, spec.label, ceilings.floor_s(case), timings, failures, case.num_tokens)


def _time_candidate(case: Case, name: str, call: Callable[[int], object], timer: Timer) -> Timing:
    clock = case.clocks.get(name, Clock.GRAPH)
    if clock is not Clock.OWN:
        return timer.measure(call, case.num_sets, clock)
    seconds = call(0)
    assert isinstance(seconds, list), "a candidate with a clock of its own returns seconds"
    return Timing.of(seconds)


def reason_of(error: Exception) -> str:
    """Return what an error says in its first line, and where it was raised."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    message = str(error).strip().splitlines()
    return f"{type(error).__name__}: {message[0] if message else ''} ({last.name}:{last.lineno})"


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Let `torch.empty` give NaN, and the largest integers, so that what is not written shows."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.use_deterministic_algorithms(before)
