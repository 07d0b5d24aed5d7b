"""`make mutants`: a sample of mutants, each run against the tests that run its lines; survivors are missing assertions.

First the tests of the rooms run once under coverage, then the mutants meet them, and then mypy, since `make lint` has
to pass too. Works on copies of the tree, one for each job. Ends `--minutes` behind that first run, or when the sample
is used up: so many mutants of each room, chosen by `--seed`. With `--keep` the next run goes on where this one ended.
Mutants that no test can notice, because they do the same, are listed with the reason in `equivalent.toml`.
`--serious` tries the mutants of `serious.toml` instead.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from ops.bench.record import append_record
from tests.mutation import serious
from tests.mutation.run import Run
from tests.mutation.sample import ROOMS, ROOT, files_of
from tests.mutation.verdicts import Count, Verdict, claim

GOAL = 0.9


def main() -> int:
    """Run the sample and print what became of it; 1 when fewer than nine in ten were noticed."""
    options = _options()
    with tempfile.TemporaryDirectory(prefix="headrace-mutants-") as directory:
        folder = Path(directory)
        if options.serious:
            return _try_serious(_copy_tree(folder / "0"), options.only)
        if options.keep is not None:
            folder = options.keep.resolve()
            claim(folder, ROOT, [path for room in ROOMS for path in files_of(room)])
        run = Run(options, folder)
        print(f"{run.num_left} of {run.size} mutants; {options.minutes:g} minutes, seed {options.seed}", flush=True)
        copies = [_copy_tree(folder / str(index)) for index in range(options.jobs)]
        began = time.monotonic()
        run.learn_coverage(copies[0], options.jobs)
        print(f"what the tests run is known after {time.monotonic() - began:.0f} s", flush=True)
        run.start_clock()
        threads = [threading.Thread(target=run.work, args=(copy,)) for copy in copies]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return _report(run, options)


def _try_serious(copy: Path, wanted: str) -> int:
    survived = 0
    for mutant, failed in serious.run(copy, wanted):
        survived += failed is None
        print(
            f"{'SURVIVED' if failed is None else 'noticed'}: {mutant.breaks}\n    {mutant.path}: {failed}", flush=True
        )
    return min(1, survived)


def _report(run: Run, options: argparse.Namespace) -> int:
    print(f"\n{'file':44}" + "".join(f"{verdict:>11}" for verdict in Verdict) + f"{'noticed':>9}")
    rows = []
    for room, counts in run.counts.items():
        total = Count()
        for path in sorted(counts):
            print(_line(path, counts[path]))
            total.add_all(counts[path])
        rows.append((room, total))
    print()
    whole = Count()
    for room, total in rows:
        print(_line(room, total))
        whole.add_all(total)
    print(_line("all", whole) + f"   (goal {GOAL:.0%}; {run.num_left} of {run.size} in the sample not tried)")
    if options.record:
        for room, total in rows:
            append_record("mutants", f"make mutants ARGS={shlex.quote(shlex.join(sys.argv[1:]))}", _row(room, total))
    return 0 if whole.num_noticed >= GOAL * whole.num_tested else 1


def _row(room: str, count: Count) -> dict[str, object]:
    return {
        "case": room,
        "num_mutants": count.num_tested + count.equivalent,
        "noticed_by_tests": count.tests,
        "noticed_by_time": count.time,
        "noticed_by_types": count.types,
        "equivalent": count.equivalent,
        "survived": count.survived,
        "share_noticed": round(count.num_noticed / count.num_tested, 3) if count.num_tested else None,
    }


def _line(name: str, count: Count) -> str:
    share = f"{count.num_noticed / count.num_tested:.0%}" if count.num_tested else "-"
    return f"{name:44}" + "".join(f"{getattr(count, verdict):11}" for verdict in Verdict) + f"{share:>9}"


def _copy_tree(target: Path) -> Path:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    shutil.rmtree(target, ignore_errors=True)
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    # What mypy knows already; without it the first survivor waits for the whole tree to be checked.
    if (ROOT / ".mypy_cache").exists():
        shutil.copytree(ROOT / ".mypy_cache", target / ".mypy_cache")
    return target


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--minutes",
        type=float,
        default=30.0,
        help="Time for the mutants, behind the run that finds which tests run which lines.",
    )
    parser.add_argument("--jobs", type=int, default=2, help="Mutants tested at once.")
    parser.add_argument("--sample", type=int, default=75, help="Mutants of each room.")
    parser.add_argument("--seed", type=int, default=0, help="Which sample.")
    parser.add_argument("--only", default="", help="A room: " + ", ".join(ROOMS))
    parser.add_argument(
        "--file", nargs="+", help="Files or folders, such as gateway/http1 gateway/admission/limits.py."
    )
    parser.add_argument("--tests", nargs="+", help="Instead of all the tests of the room.")
    parser.add_argument(
        "--keep",
        type=Path,
        help="A folder for what became of each mutant: the next run with it goes on where this one ended.",
    )
    parser.add_argument("--again", action="store_true", help="With --keep, try what survived before once more.")
    parser.add_argument("--record", action="store_true", help="Append the figures to ops/bench/results/mutants.jsonl.")
    parser.add_argument("--serious", action="store_true", help="Try the mutants of serious.toml, and no sample.")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
