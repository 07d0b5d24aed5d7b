"""`make mutants`: a sample of mutants of each room, run against the tests near them; a survivor lacks an assertion.

A mutant meets mypy, since `make lint` has to pass too, then the tests of its file, those that import it and those of
its folder, in a copy of the tree. One that crashes wherever its line runs says nothing about the tests, and is not
counted. One whose tests ran out of time is counted apart, and a room with many of these fails. The same `--seed`, code
and `--sample` try the same mutants, and `--skip` goes on where an earlier run ended.
Mutants without effect are in `equivalent.toml`. `--serious` tries the mutants of `serious.toml` instead.
"""

from __future__ import annotations

import argparse
import compileall
import shlex
import subprocess
import sys
import tempfile
import time
from collections import Counter
from itertools import chain, zip_longest
from pathlib import Path

import mypy.api

from ops.bench.record import append_record
from ops.mutation.fork import changed_file, prepare, run_forked
from ops.mutation.judge import CoveringTests, Judge, Verdict, is_goal_reached, report
from ops.mutation.mutant import Mutant, equivalent_mutants, serious_mutants
from ops.mutation.sample import PACKAGES, ROOT, draw, rooms
from ops.mutation.semantic import is_crash

_COMPILED = ("tests", *PACKAGES)


def main() -> int:
    """Run the sample and print the verdicts; 1 if a room missed the goal of `report`."""
    options = _options()
    with tempfile.TemporaryDirectory(prefix="headrace-mutants-") as directory:
        copy = _copy_tree(Path(directory))
        prepare()
        if options.serious:
            return _try_serious(copy, tuple(room.replace(".", "/") for room in options.room))
        drawn = _sample(options)
        counts = {room: Counter[Verdict]() for room, _ in drawn}
        print(f"{len(drawn)} mutants, seed {options.seed}, at most {options.minutes:g} minutes", flush=True)
        judge, covering, until = Judge(copy), CoveringTests(copy), time.monotonic() + options.minutes * 60
        for room, mutant in drawn:
            if time.monotonic() > until:
                break
            verdict, test = _verdict(judge, covering, copy, mutant, options.limit)
            counts[room][verdict] += 1
            print(f"{verdict.upper()} {mutant}" + (f"\n    {test}" if test else ""), flush=True)
    num_left = len(drawn) - sum(each.total() for each in counts.values())
    print(f"\n{report(counts)}; {num_left} of {len(drawn)} in the sample not tried")
    if options.record:
        _record(counts)
    return 0 if all(map(is_goal_reached, counts.values())) else 1


def _sample(options: argparse.Namespace) -> list[tuple[str, Mutant]]:
    """Draw mutants of the rooms, which take turns: a run that ends early has tried something of each."""
    drawn: list[list[tuple[str, Mutant]]] = []
    for room, files in rooms().items():
        chosen = [path for path in files if not options.file or path.startswith(tuple(options.file))]
        if chosen and f"{room}.".startswith(tuple(f"{each}." for each in options.room) or ""):
            drawn.append([(room, mutant) for mutant in draw(chosen, options.sample, options.seed, options.skip)])
    return [each for each in chain.from_iterable(zip_longest(*drawn)) if each is not None]


def _verdict(
    judge: Judge, covering: CoveringTests, copy: Path, mutant: Mutant, seconds: float
) -> tuple[Verdict, str | None]:
    if any((mutant.path, mutant.before, mutant.after) == (e.path, e.before, e.after) for e in equivalent_mutants()):
        return Verdict.EQUIVALENT, None
    if error := _type_error(copy, mutant):
        return (Verdict.CRASHED if is_crash(mutant.operator, error) else Verdict.TYPES), error
    until = time.monotonic() + seconds
    for tests in covering.of(mutant.path):
        if (failed := judge.failure(mutant.path, mutant.source, tests, until - time.monotonic())) is not None:
            return failed
    return Verdict.SURVIVED, None


def _try_serious(copy: Path, wanted: tuple[str, ...]) -> int:
    judge, num_survived = Judge(copy), 0
    for mutant in serious_mutants():
        if mutant.path.startswith(wanted or ""):
            failed = judge.failure(mutant.path, mutant.source(copy), mutant.tests, 300.0)
            is_noticed = failed is not None and failed.verdict is not Verdict.UNFINISHED
            num_survived += not is_noticed
            print(f"{'noticed' if is_noticed else 'SURVIVED'}: {mutant.breaks}\n    {mutant.path}", flush=True)
    return min(1, num_survived)


def _record(rooms: dict[str, Counter[Verdict]]) -> None:
    for room, counts in rooms.items():
        # A verdict is called "time", as is the moment of every record.
        row = {"case": room, "group": "semantic", **{f"num_{verdict}": counts[verdict] for verdict in Verdict}}
        append_record("mutants", f"make mutants ARGS={shlex.quote(shlex.join(sys.argv[1:]))}", row)


def _type_error(copy: Path, mutant: Mutant) -> str | None:
    with changed_file(copy / mutant.path, mutant.source):
        checked = run_forked(copy, lambda: _check_types(mutant.path), 120.0)
    return checked[1].split("\n", 1)[0] if checked is not None and checked[0] == 1 else None


def _check_types(path: str) -> int:
    output, _, status = mypy.api.run(["--no-error-summary", path])
    print(output)
    return status


def _copy_tree(target: Path) -> Path:
    """Copy what git knows or would add, its bytecode, and what mypy knows: the first mutant would wait for them."""
    for package in _COMPILED:
        compileall.compile_dir(ROOT / package, quiet=2)
    listed = "git ls-files -z --cached --others --exclude-standard; printf '.mypy_cache\\0'"
    listed += f"; find {' '.join(_COMPILED)} -name __pycache__ -print0"
    copied = "tar --null --files-from - --ignore-failed-read --warning no-failed-read --create | tar --extract"
    subprocess.run(["sh", "-c", f'({listed}) | {copied} --directory "$0"', target], cwd=ROOT, check=True)
    return target


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--room", nargs="+", default=[], help="Rooms or packages, such as gateway.dispatch or gpu_worker."
    )
    parser.add_argument("--file", nargs="+", help="Files or folders instead, such as gateway/http1/body.py.")
    parser.add_argument("--sample", type=int, default=10, help="Mutants of each room.")
    parser.add_argument("--seed", type=int, default=0, help="Which sample.")
    parser.add_argument("--skip", type=int, default=0, help="Number of mutants to skip at the front of each sample.")
    parser.add_argument("--minutes", type=float, default=30.0, help="End after this time.")
    parser.add_argument("--limit", type=float, default=90.0, help="Seconds of tests for each mutant.")
    parser.add_argument("--record", action="store_true", help="Append the figures to ops/bench/results/mutants.jsonl.")
    parser.add_argument("--serious", action="store_true", help="Try the mutants of serious.toml, and no sample.")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
