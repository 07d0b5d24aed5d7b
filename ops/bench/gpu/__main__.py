"""The command `python -m ops.bench.gpu`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from ops.bench.gpu.results import FILE_NAME, HEADER
from ops.bench.gpu.run import GRACE_S, run_suites
from ops.bench.gpu.suites import all_suites
from ops.bench.record import bench_parser

_RESULTS = Path(__file__).parents[1] / "results"
_EPILOG = """\
On a bare machine with a GPU, from the root of the repository:

  PYTHONUNBUFFERED=1 python3 -m ops.bench.gpu --limit-s 500

That needs torch, triton and numpy; the whole steps need msgspec, safetensors, tokenizers and transformers too. How it
is measured: ops/bench/gpu/METHOD.md. What to do about a low figure: ops/bench/gpu/HOPPER.md."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the bench; return 0 when all was right, 1 when an op was wrong or failed, 2 when there is no GPU."""
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
    directory = Path(os.environ.get("OUT") or _RESULTS)
    told = {
        "bench": all_suites.__module__,
        "directory": str(directory),
        "command": " ".join(["python", "-m", "ops.bench.gpu", *(sys.argv[1:] if arguments is None else arguments)]),
        "process": os.getpid(),
        "checks_only": options.checks_only,
        "time_anyway": options.time_anyway,
    }
    print(HEADER, flush=True)
    verdicts = run_suites([suite.name for suite in chosen], told, options.limit_s, options.suite_limit_s)
    print(verdicts, f"records: {directory / FILE_NAME}", sep="; ")
    return 0 if verdicts.is_good else 1


def _parser(names: Sequence[str]) -> argparse.ArgumentParser:
    description = "Check and time the kernels, and whole steps of the engine, on a GPU, in a process a suite."
    parser = bench_parser("gpu", description, _EPILOG)
    only = f"run the suites whose name begins so; may be given again: {', '.join(names)}"
    parser.add_argument("--only", action="append", metavar="NAME", help=only)
    parser.add_argument("--checks-only", action="store_true", help="compare with the oracles, time nothing")
    parser.add_argument("--dry-run", action="store_true", help="list what would run, and exit with code 2")
    parser.add_argument("--time-anyway", action="store_true", help="time ops that are wrong, too; their records say so")
    limit = f"start nothing after this many seconds, and kill what still runs {GRACE_S:.0f} s later"
    parser.add_argument("--limit-s", type=float, default=500.0, help=limit)
    parser.add_argument("--suite-limit-s", type=float, default=150.0, help="the same, of each suite")
    return parser


if __name__ == "__main__":
    sys.exit(main())
