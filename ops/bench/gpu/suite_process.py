"""The process of one suite: it checks the op, and times it if it is right, its records appended at once."""

from __future__ import annotations

import time
from dataclasses import asdict
from importlib import import_module
from pathlib import Path

import torch

from ops.bench.gpu.case import OpSuite
from ops.bench.gpu.ceilings import Ceilings, measure_ceilings
from ops.bench.gpu.prepared_process import Json, serve_one_job
from ops.bench.gpu.record import RunRecord
from ops.bench.gpu.run import check_op, time_op
from ops.bench.gpu.table import HEADER, case_line, ceiling_line, check_lines, failure_lines
from ops.bench.gpu.timer import Timer


def run_job(job: Json) -> Json:
    """Measure the ceilings, where no suite is named, or run a suite; `ops.bench.gpu.plan` makes the jobs."""
    deadline = time.monotonic() + job["limit_s"]
    bench = import_module(job["bench"])
    device, timer = bench.device(), bench.timer()
    if job["suite"] is None:
        measured = measure_ceilings(timer, device)
        print(f"{ceiling_line(measured)}\n{HEADER}", flush=True)
        return asdict(measured)
    ceilings = None
    if not job["checks_only"]:
        ceilings = Ceilings(**job["ceilings"]) if job["ceilings"] else measure_ceilings(timer, device)
    record = RunRecord(Path(job["directory"]), device, ceilings, job["command"])
    [suite] = [suite for suite in bench.all_suites() if suite.name == job["suite"]]
    return {"is_right": run_suite(suite, device, timer, ceilings, record, deadline, job["time_anyway"])}


def run_suite(
    suite: OpSuite,
    device: torch.device,
    timer: Timer,
    ceilings: Ceilings | None,
    record: RunRecord,
    deadline: float,
    time_anyway: bool = False,
) -> bool:
    """Check an op, then time it; return whether all checks were right.

    Args:
        suite: Of the op.
        device: To run on.
        timer: To measure with.
        ceilings: What fractions are of; None times nothing.
        record: To append to.
        deadline: On the monotonic clock; no case and no candidate starts later.
        time_anyway: Time an op that is wrong too; its records say that it is.
    """
    checks = check_op(suite, device)
    record.append_checks(checks)
    print("\n".join(check_lines(checks)), flush=True)
    is_right = all(check.is_right for check in checks)
    if ceilings is not None and (is_right or time_anyway):
        cases = []
        for case in time_op(suite, device, timer, ceilings, deadline):
            cases.append(case)
            record.append_case(case, is_right)
            print(case_line(case) + ("" if is_right else "  WRONG RESULTS"), flush=True)
        print("".join(f"{line}\n" for line in failure_lines(cases)), end="", flush=True)
    return is_right


if __name__ == "__main__":
    serve_one_job(run_job)
