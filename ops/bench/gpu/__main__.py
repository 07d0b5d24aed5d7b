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
from ops.bench.gpu.record import RunRecord
from ops.bench.gpu.run import check_op, time_op
from ops.bench.gpu.suites import all_suites
from ops.bench.gpu.table import HEADER, case_line, ceiling_line, check_lines, failure_lines
from ops.bench.gpu.timer import CudaTimer, Timer

_RESULTS = Path(__file__).parents[1] / "results"
_EPILOG = """\
On a bare machine with a GPU, from the root of the repository:

  PYTHONUNBUFFERED=1 python3 -m ops.bench.gpu --limit-s 540

That needs torch and triton; the whole steps need msgspec, numpy, safetensors, tokenizers and transformers too. How it
is measured: ops/bench/gpu/METHOD.md. What to do about a low figure: ops/bench/gpu/HOPPER.md."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the bench; return 0 when all ops were right, 1 when one was not, 2 when there is nothing to run on."""
    suites = all_suites()
    parser = _parser([suite.name for suite in suites])
    options = parser.parse_args(arguments)
    for name in options.only or ():
        if not any(suite.name.startswith(name) for suite in suites):
            parser.error(f"--only {name}: no suite begins so; there are {', '.join(suite.name for suite in suites)}")
    chosen = [suite for suite in suites if not options.only or suite.name.startswith(tuple(options.only))]
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
    """Measure the ceilings; then check each op and time it if it is right, its records appended at once."""
    ceilings = None if checks_only else measure_ceilings(timer, device)
    if ceilings is not None:
        print(f"{ceiling_line(ceilings)}\n{HEADER}", flush=True)
    record = RunRecord(directory, device, ceilings)
    wrong, late = [], []
    for suite in suites:
        if time.monotonic() > deadline:
            late.append(suite.name)
            continue
        checks = check_op(suite, device)
        record.append_checks(checks)
        print("\n".join(check_lines(checks)), flush=True)
        if not all(check.is_right for check in checks):
            wrong.append(suite.name)
        elif ceilings is not None:
            cases = []
            for case in time_op(suite, device, timer, ceilings, deadline):
                cases.append(case)
                record.append_case(case)
                print(case_line(case), flush=True)
            print("".join(f"{line}\n" for line in failure_lines(cases)), end="", flush=True)
    verdicts = [f"wrong, not timed: {', '.join(wrong)}" if wrong else "all ops are right"]
    verdicts += [f"no time was left for: {', '.join(late)}"] if late else []
    print(*verdicts, f"records: {record.path}", sep="; ")
    return 1 if wrong else 0


def _parser(names: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m ops.bench.gpu",
        description="Check and time the kernels, and whole steps of the engine, on a GPU.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    only = f"run the suites whose name begins so; may be given again: {', '.join(names)}"
    parser.add_argument("--only", action="append", metavar="NAME", help=only)
    parser.add_argument("--checks-only", action="store_true", help="compare with the oracles, time nothing")
    parser.add_argument("--dry-run", action="store_true", help="list what would run, and exit with code 2")
    parser.add_argument("--out", metavar="DIR", help="where gpu.jsonl is appended to (default: OUT, else the results)")
    parser.add_argument("--limit-s", type=float, default=540.0, help="start nothing after this many seconds")
    return parser


if __name__ == "__main__":
    sys.exit(main())
