"""The command `python -m ops.bench.gpu`."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from ops.bench.gpu.case import OpSuite
from ops.bench.gpu.ceilings import measure_ceilings
from ops.bench.gpu.record import append_records
from ops.bench.gpu.run import CaseResult, CheckResult, check_op, time_op
from ops.bench.gpu.suites import all_suites
from ops.bench.gpu.table import HEADER, case_line, ceiling_line, check_lines, failure_lines
from ops.bench.gpu.timer import CudaTimer, Timer

_RESULTS = Path(__file__).parents[1] / "results"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the bench; return 0 when all ops were right, 1 when one was not, 2 when there is nothing to run on."""
    suites = all_suites()
    options = _parser([suite.name for suite in suites]).parse_args(arguments)
    chosen = [suite for suite in suites if not options.only or suite.name in options.only]
    if options.dry_run or not torch.cuda.is_available():
        for suite in chosen:
            print(f"{suite.name}: {', '.join(spec.label for spec in suite.cases)}")
        reason = "--dry-run was given" if options.dry_run else "torch finds no CUDA device"
        print(
            f"Nothing was run: {reason}. The bench needs a GPU with compute capability 8.0 or higher.", file=sys.stderr
        )
        return 2
    directory = Path(options.out or os.environ.get("OUT") or _RESULTS)
    deadline = time.monotonic() + options.limit_s
    return run_bench(chosen, torch.device("cuda", 0), CudaTimer(), directory, deadline, checks_only=options.checks_only)


def run_bench(
    suites: Sequence[OpSuite],
    device: torch.device,
    timer: Timer,
    directory: Path,
    deadline: float,
    checks_only: bool = False,
) -> int:
    """Check, measure the ceilings, time; print a table and append the records."""
    checks: list[CheckResult] = []
    right: list[OpSuite] = []
    for suite in suites:
        results = check_op(suite, device)
        checks += results
        print("\n".join(check_lines(results)), flush=True)
        if all(result.is_right for result in results):
            right.append(suite)
    cases: list[CaseResult] = []
    ceilings = None
    try:
        if not checks_only:
            ceilings = measure_ceilings(timer, device)
            print(f"\n{ceiling_line(ceilings)}\n{HEADER}", flush=True)
            for suite in right:
                for result in time_op(suite, device, timer, ceilings, deadline):
                    cases.append(result)
                    print(case_line(result), flush=True)
            print("\n".join(failure_lines(cases)))
    finally:
        path = append_records(directory, device, ceilings, checks, cases)
    wrong = [suite.name for suite in suites if suite not in right]
    print(f"wrong, and therefore not timed: {', '.join(wrong)}" if wrong else "all ops are right", f"; records: {path}")
    return 1 if wrong else 0


def _parser(names: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m ops.bench.gpu", description="Check and time the kernels on a GPU.")
    parser.add_argument("--only", action="append", choices=names, help="an op to run; may be given again")
    parser.add_argument("--checks-only", action="store_true", help="compare with the oracles, time nothing")
    parser.add_argument("--dry-run", action="store_true", help="list what would run, and exit with code 2")
    parser.add_argument("--out", metavar="DIR", help="where gpu.jsonl is appended to (default: OUT, else the results)")
    parser.add_argument("--limit-s", type=float, default=540.0, help="start no case after this many seconds")
    return parser


if __name__ == "__main__":
    sys.exit(main())
