"""One run of the bench: a process a suite, each with a time limit, and what became of them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from ops.bench.gpu.prepared_process import JobFailedError, Json, PreparedProcess, prepared_processes
from ops.bench.gpu.results import append_failure

_MODULE = "ops.bench.gpu.run"
# A suite starts nothing after its limit; what it has started by then may take this long before its process is killed.
GRACE_S = 30.0


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be run.

    Attributes:
        suites: Names, in their order.
        bench: Module whose `all_suites()`, `device()` and `timer()` the processes call.
        directory: Where `gpu.jsonl` is appended to.
        command: What is recorded of how it was called.
        limit_s: No suite starts later, and none goes on for longer than `GRACE_S` after it.
        suite_limit_s: Of one suite.
        checks_only: Time nothing.
        time_anyway: Time ops that are wrong, too.
    """

    suites: Sequence[str]
    bench: str
    directory: Path
    command: str
    limit_s: float
    suite_limit_s: float
    checks_only: bool = False
    time_anyway: bool = False

    def job(self, suite: str | None, limit_s: float, ceilings: Json | None) -> Json:
        """Return what the process of a suite is told; without a suite it measures the ceilings."""
        told = {name: getattr(self, name) for name in ("bench", "command", "checks_only", "time_anyway")}
        return told | {"directory": str(self.directory), "suite": suite, "limit_s": limit_s, "ceilings": ceilings}


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


def run_plan(plan: Plan) -> Verdicts:
    """Measure the ceilings, then run suite after suite; a process that dies or hangs costs its own suite only."""
    verdicts = Verdicts()
    deadline = time.monotonic() + plan.limit_s
    jobs: list[str | None] = [*([] if plan.checks_only else [None]), *plan.suites]
    ceilings: Json | None = None
    with closing(prepared_processes(_MODULE, len(jobs))) as processes:
        for suite, process in zip(jobs, processes, strict=True):
            limit_s = min(deadline - time.monotonic(), plan.suite_limit_s)
            if suite is None:
                ceilings = _measure_ceilings(process, plan, limit_s)
            elif limit_s <= 0:
                verdicts.late = list(plan.suites[plan.suites.index(suite) :])
                break
            else:
                _run_suite(process, suite, plan, limit_s, ceilings, verdicts)
    return verdicts


def _measure_ceilings(process: PreparedProcess, plan: Plan, limit_s: float) -> Json | None:
    try:
        return process.run(plan.job(None, limit_s, None), limit_s + GRACE_S)
    except JobFailedError as error:
        print(f"ceilings: {error}; each suite measures its own", flush=True)
        return None


def _run_suite(
    process: PreparedProcess, suite: str, plan: Plan, limit_s: float, ceilings: Json | None, verdicts: Verdicts
) -> None:
    try:
        answer = process.run(plan.job(suite, limit_s, ceilings), limit_s + GRACE_S)
    except JobFailedError as error:
        verdicts.failed[suite] = str(error)
        append_failure(plan.directory, plan.command, suite, str(error))
        print(f"FAILED {suite}: {error}", flush=True)
    else:
        if not answer["is_right"]:
            verdicts.wrong.append(suite)
