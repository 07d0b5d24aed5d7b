"""The command `python -m ops.bench.gpu.tune`."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import torch

from ops.bench.gpu.plan import GRACE_S
from ops.bench.gpu.prepared_process import JobFailedError, prepared_processes
from ops.bench.gpu.tune.tables import ALL_TABLES, ROOT
from ops.bench.options import bench_parser

_EPILOG = """\
On a bare machine with a GPU, which needs torch and triton only, from the root of the repository:

  PYTHONUNBUFFERED=1 python3 -m ops.bench.gpu.tune --limit-s 500

An entry that no time is left for stays as it is; --only takes one table at a time. With OUT set, the changed tables
are written below that folder and not in place: copy them over the tree, read the difference, and run the bench before
and after."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Tune; return 0 when all entries were decided, 1 when one was not, 2 when there is no GPU."""
    description = "Measure launches of the kernels, and write the best into their tables."
    parser = bench_parser("gpu.tune", description, _EPILOG)
    names = [table.name for table in ALL_TABLES]
    parser.add_argument("--only", action="append", choices=names, help="a table to tune; may be given again")
    parser.add_argument("--limit-s", type=float, default=500.0, help="start no entry after this many seconds")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("Nothing was tuned: torch finds no CUDA device.", file=sys.stderr)
        return 2
    tables = [name for name in names if not options.only or name in options.only]
    target = Path(os.environ.get("OUT") or ROOT)
    return 0 if tune_tables(tables, target, options.limit_s) else 1


def tune_tables(tables: Sequence[str], target: Path, limit_s: float) -> bool:
    """Tune each table in a process of its own; return whether all entries were decided.

    Args:
        tables: Their names.
        target: Folder that the paths of tables are below.
        limit_s: After these seconds nothing is started, and `GRACE_S` later what still runs is killed.
    """
    is_complete = True
    deadline = time.monotonic() + limit_s
    with closing(prepared_processes("ops.bench.gpu.tune.table_process", len(tables))) as processes:
        for table, process in zip(tables, processes, strict=True):
            left_s = max(0.0, deadline - time.monotonic())
            job = {"table": table, "target": str(target), "limit_s": left_s}
            try:
                is_complete &= process.run(job, left_s + GRACE_S)["is_complete"]
            except JobFailedError as error:
                print(f"{table}: {error}; its other entries stay as they are", flush=True)
                is_complete = False
    return is_complete


if __name__ == "__main__":
    sys.exit(main())
