"""Suites, each in a process of its own with a time limit: its checks, then its cases, each recorded at once.

A crash, a hang or a CUDA error that never clears ends with its process and costs no other suite, and a failing peer
does not stop the others.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from ops.bench.gpu.case import OURS, Case, CaseSpec, Clock, OpSuite
from ops.bench.gpu.results import (
    CaseResult,
    CheckResult,
    RunRecord,
    append_failure,
    ceiling_line,
    check_lines,
    failure_lines,
)
from ops.bench.gpu.timer import Ceilings, Timer, Timing, measure_ceilings
from ops.stack.tether import tethered

Json = dict[str, Any]
# Exit code of a suite that came to its end and was wrong.
WRONG = 3
# A suite starts nothing after its limit; a case started by then may take this long before its process is killed.
GRACE_S = 30.0
_MODULE = "ops.bench.gpu.run"


class JobFailedError(RuntimeError):
    """A process ended before its job did; the message says how."""


@dataclass(slots=True)
class Verdicts:
    """What became of the suites."""

    wrong: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    late: list[str] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        """Return True where every suite that was run came to its end, and was right."""
        return not self.wrong and not self.failed

    def __str__(self) -> str:
        parts = [f"wrong: {', '.join(self.wrong)}" if self.wrong else "no op was wrong"]
        parts += [f"{name} did not finish ({reason})" for name, reason in self.failed.items()]
        parts += [f"no time was left for: {', '.join(self.late)}"] if self.late else []
        return "; ".join(parts)


def run_apart(arguments: Sequence[str], limit_s: float, ends: Sequence[int] = (0,)) -> int:
    """Run `python -m` with these arguments in a process of its own; return its exit code, one of `ends`.

    Raises:
        JobFailedError: It ended otherwise, or was killed after `limit_s`.
    """
    command = tethered([sys.executable, "-m", *arguments])
    try:
        code = subprocess.run(command, env=os.environ | {"PYTHONUNBUFFERED": "1"}, timeout=limit_s).returncode
    except subprocess.TimeoutExpired as error:
        raise JobFailedError(f"killed: it ran longer than {limit_s:.0f} s") from error
    if code < 0:
        raise JobFailedError(f"its process was ended by {signal.Signals(-code).name}")
    if code not in ends:
        raise JobFailedError(f"its process ended with exit code {code}")
    return code


def run_suites(suites: Sequence[str], told: Json, limit_s: float, suite_limit_s: float) -> Verdicts:
    """Run suite after suite, each in a process told `told`; none starts, or runs `GRACE_S` longer, after `limit_s`.

    `told` has the module `bench` with `all_suites()`, `device()` and `timer()`, the `directory` of `gpu.jsonl`, the
    `command` and `process` to record, and whether nothing (`checks_only`) or all (`time_anyway`) is timed.
    """
    verdicts = Verdicts()
    deadline = time.monotonic() + limit_s
    for place, suite in enumerate(suites):
        left_s = min(deadline - time.monotonic(), suite_limit_s)
        if left_s <= 0:
            verdicts.late = list(suites[place:])
            break
        job = json.dumps(told | {"suite": suite, "limit_s": left_s})
        try:
            if run_apart([_MODULE, job], left_s + GRACE_S, (0, WRONG)) == WRONG:
                verdicts.wrong.append(suite)
        except JobFailedError as error:
            verdicts.failed[suite] = str(error)
            append_failure(Path(told["directory"]), told["command"], told["process"], suite, str(error))
            print(f"FAILED {suite}: {error}", flush=True)
    return verdicts


def run_job(job: dict[str, Any]) -> bool:
    """Run a suite, as `ops.bench.gpu.run` says; return whether it was right."""
    deadline = time.monotonic() + job["limit_s"]
    bench = import_module(job["bench"])
    device, timer = bench.device(), bench.timer()
    ceilings = None if job["checks_only"] else measure_ceilings(timer, device)
    if ceilings is not None:
        print(ceiling_line(ceilings), flush=True)
    record = RunRecord(Path(job["directory"]), device, ceilings, job["command"], job["process"])
    [suite] = [suite for suite in bench.all_suites() if suite.name == job["suite"]]
    return run_suite(suite, device, timer, ceilings, record, deadline, job["time_anyway"])


def run_suite(
    suite: OpSuite,
    device: torch.device,
    timer: Timer,
    ceilings: Ceilings | None,
    record: RunRecord,
    deadline: float,
    time_anyway: bool = False,
) -> bool:
    """Check an op, then time it; return whether all checks were right."""
    checks = check_op(suite, device)
    record.append(*checks)
    print("\n".join(check_lines(checks)), flush=True)
    is_right = all(check.is_right for check in checks)
    if ceilings is not None and (is_right or time_anyway):
        cases = []
        for case in time_op(suite, device, timer, ceilings, deadline):
            cases.append(case)
            record.append(case, is_right=is_right)
            print(case.line() + ("" if is_right else "  WRONG RESULTS"), flush=True)
        print("".join(f"{line}\n" for line in failure_lines(cases)), end="", flush=True)
    return is_right


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
        except Exception as error:  # a kernel's exception is the result
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
        if device.type == "cuda":
            # Memory held by a failure's traceback or a cycle would be missing in the next case.
            gc.collect()
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
    """Return the first line of an error, and where it was raised."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    message = str(error).strip().splitlines()
    return f"{type(error).__name__}: {message[0] if message else ''} ({last.name}:{last.lineno})"


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fill `torch.empty` with NaN or the largest integers, so that unwritten elements show."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.use_deterministic_algorithms(before)


if __name__ == "__main__":
    sys.exit(0 if run_job(json.loads(sys.argv[1])) else WRONG)
