"""`make mutants`: a sample of mutants, each run against the tests that run its lines; survivors are missing assertions.

First the tests of the rooms run once under coverage, then the mutants meet them, and then mypy, since `make lint` has
to pass too. Works on copies of the tree, one for each job. Ends `--minutes` behind that first run, or when the sample
is used up: so many mutants of each room, chosen by `--seed`. Mutants that no test can notice, because they do the same,
are listed with the reason in `equivalent.toml`. `--serious` tries the mutants of `serious.toml` instead.
"""

from __future__ import annotations

import argparse
import random
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from ops.bench.record import append_record
from tests.mutation import serious
from tests.mutation.covering import CoveringTests, mirrored
from tests.mutation.equivalent import equivalent_mutants
from tests.mutation.mutants import Mutant, MutantSource
from tests.mutation.runner import TestRunner

ROOT = Path(__file__).resolve().parents[2]
PYTEST = ["-x", "-q", "--no-header", "-p", "no:cacheprovider", "--timeout=60"]
GOAL = 0.9

# Which tests look after which room.
ROOMS = {
    "gateway": ["tests/gateway"],
    "gpu_worker/core": ["tests/gpu_worker/core", "tests/gpu_worker/engine/test_engine.py"],
    "gpu_worker/consumer": ["tests/gpu_worker/consumer"],
    "shared": ["tests/shared"],
}
# Rooms of which coverage knows little, since most of their tests run them in processes of their own.
WITH_PROCESSES = ["gateway"]
# Tests that read the code of a room and run none of it.
READING = {room: ["tests/gateway/test_errors.py"] for room in ("gateway", "shared")}
# What a room's code does is noticed by the tests of these rooms too.
ALSO = {"shared": ["gateway", "gpu_worker/consumer"]}


@dataclass(slots=True)
class _Count:
    """What became of the mutants of a file."""

    killed: int = 0
    ill_typed: int = 0
    equivalent: int = 0
    survived: list[Mutant] = field(default_factory=list)

    def add(self, other: _Count) -> None:
        self.killed += other.killed
        self.ill_typed += other.ill_typed
        self.equivalent += other.equivalent
        self.survived += other.survived

    @property
    def num_noticed(self) -> int:
        return self.killed + self.ill_typed

    @property
    def num_tested(self) -> int:
        return self.num_noticed + len(self.survived)


class Run:
    """One run: the sample still to do, and what became of the rest. Its threads share it under one lock."""

    def __init__(self, options: argparse.Namespace) -> None:
        """Choose the sample."""
        self._lock = threading.Lock()
        self._seconds = options.minutes * 60
        self._until = 0.0
        self._tests_of = dict.fromkeys(ROOMS, options.tests) if options.tests else ROOMS
        self._covering: dict[str, CoveringTests] = {}
        self._equivalent = {(each.path, each.before, each.after) for each in equivalent_mutants()}
        self.rooms = [room for room in ROOMS if room.startswith(options.only) and _chosen(room, options.file)]
        self.counts: dict[str, dict[str, _Count]] = {room: {} for room in self.rooms}
        self._sample = [
            (room, mutant) for room in self.rooms for mutant in _sample(_chosen(room, options.file), options)
        ]
        random.Random(options.seed).shuffle(self._sample)
        self.size = len(self._sample)

    def learn_coverage(self, copy: Path, directory: Path, jobs: int) -> None:
        """Run the tests of each room without a mutant, so many rooms at once."""
        rooms = list(dict.fromkeys(each for room in self.rooms for each in (room, *ALSO.get(room, ()))))
        by_tests = {tuple(self._tests_of[room]): room for room in reversed(rooms)}
        files = {tests: directory / f"coverage-{number}" for number, tests in enumerate(by_tests)}
        with ThreadPoolExecutor(jobs) as pool:
            learnt = dict(pool.map(lambda tests: (tests, CoveringTests(copy, list(tests), files[tests])), by_tests))
        self._covering = {room: learnt[tuple(self._tests_of[room])] for room in rooms}
        for covering in learnt.values():
            for failed in covering.failed:
                print(f"fails without a mutant and is left out: {failed}", flush=True)

    def start_clock(self) -> None:
        """Begin to count the minutes: what was needed before the first mutant takes none of them."""
        self._until = time.monotonic() + self._seconds

    def work(self, copy: Path) -> None:
        """Test mutants in a copy of the tree until there are none, or no time, left."""
        runner = TestRunner(copy)
        while (chosen := self._take()) is not None:
            room, mutant = chosen
            tests = self._tests(room, mutant)
            target = copy / mutant.path
            original = target.read_text()
            target.write_text(mutant.source)
            is_killed = runner.failure(PYTEST, tests) is not None
            is_ill_typed = not is_killed and not _types_pass(copy, mutant.path)
            if not is_killed and not is_ill_typed:
                is_killed = runner.failure(PYTEST, mirrored(mutant.path, room in WITH_PROCESSES)) is not None
            target.write_text(original)
            with self._lock:
                count = self._count(room, mutant)
                if is_killed:
                    count.killed += 1
                elif is_ill_typed:
                    count.ill_typed += 1
                else:
                    count.survived.append(mutant)
                    print(f"survived {len(tests)} tests: {mutant}", flush=True)
        runner.close()

    def _tests(self, room: str, mutant: Mutant) -> list[str]:
        """Return the tests that run a mutant's lines; all of the room where they run at import."""
        found = [self._covering[each].of(mutant.path, mutant.lines) for each in (room, *ALSO.get(room, ()))]
        if None in found:
            return self._tests_of[room]
        running = dict.fromkeys(test for tests in found for test in tests or ())
        return [*running, *READING.get(room, ())]

    def _take(self) -> tuple[str, Mutant] | None:
        with self._lock:
            while self._sample and time.monotonic() < self._until:
                room, mutant = self._sample.pop()
                if (mutant.path, mutant.before, mutant.after) not in self._equivalent:
                    return room, mutant
                self._count(room, mutant).equivalent += 1
        return None

    def _count(self, room: str, mutant: Mutant) -> _Count:
        return self.counts[room].setdefault(mutant.path, _Count())


def main() -> int:
    """Run the sample and print what became of it; 1 when fewer than nine in ten were noticed."""
    options = _options()
    with tempfile.TemporaryDirectory(prefix="headrace-mutants-") as directory:
        if options.serious:
            return _try_serious(_copy_tree(Path(directory) / "0"), options.only)
        run = Run(options)
        print(f"{run.size} mutants; {options.minutes:g} minutes, seed {options.seed}", flush=True)
        copies = [_copy_tree(Path(directory) / str(index)) for index in range(options.jobs)]
        began = time.monotonic()
        run.learn_coverage(copies[0], Path(directory), options.jobs)
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
    for mutant, failed in serious.run(copy, wanted, PYTEST):
        survived += failed is None
        print(
            f"{'SURVIVED' if failed is None else 'noticed'}: {mutant.breaks}\n    {mutant.path}: {failed}", flush=True
        )
    return min(1, survived)


def _report(run: Run, options: argparse.Namespace) -> int:
    print(f"\n{'file':44}{'tests':>8}{'types':>8}{'survived':>10}{'equivalent':>12}{'noticed':>10}")
    rows = []
    for room, counts in run.counts.items():
        total = _Count()
        for path in sorted(counts):
            print(_line(path, counts[path]))
            total.add(counts[path])
        rows.append((room, total))
    print()
    whole = _Count()
    for room, total in rows:
        print(_line(room, total))
        whole.add(total)
    print(_line("all", whole) + f"   (goal {GOAL:.0%}; {run.size} in the sample)")
    if options.record:
        for room, total in rows:
            append_record("mutants", f"make mutants ARGS={shlex.quote(shlex.join(sys.argv[1:]))}", _row(room, total))
    return 0 if whole.num_noticed >= GOAL * whole.num_tested else 1


def _row(room: str, count: _Count) -> dict[str, object]:
    return {
        "case": room,
        "num_mutants": count.num_tested + count.equivalent,
        "noticed_by_tests": count.killed,
        "noticed_by_types": count.ill_typed,
        "equivalent": count.equivalent,
        "survived": len(count.survived),
        "share_noticed": round(count.num_noticed / count.num_tested, 3) if count.num_tested else None,
    }


def _line(name: str, count: _Count) -> str:
    share = f"{count.num_noticed / count.num_tested:.0%}" if count.num_tested else "-"
    return f"{name:44}{count.killed:8}{count.ill_typed:8}{len(count.survived):10}{count.equivalent:12}{share:>10}"


def _sample(paths: list[str], options: argparse.Namespace) -> list[Mutant]:
    """Choose different mutants of these files, each mutant as likely as any other."""
    sources = [MutantSource(ROOT, path) for path in paths]
    places = [(source, index) for source in sources for index in range(len(source))]
    random.Random(options.seed).shuffle(places)
    chosen: dict[tuple[str, str, str], Mutant] = {}
    for source, index in places:
        if len(chosen) == options.sample:
            break
        mutant = source.mutant(index)
        if mutant.before != mutant.after:
            chosen.setdefault((mutant.path, mutant.before, mutant.after), mutant)
    return list(chosen.values())


def _files(room: str) -> list[str]:
    paths = sorted((ROOT / room).rglob("*.py"))
    return [str(path.relative_to(ROOT)) for path in paths if path.name not in ("__init__.py", "__main__.py")]


def _chosen(room: str, wanted: list[str] | None) -> list[str]:
    """Return the files of a room, or those of them that were asked for, by name or by folder."""
    files = _files(room)
    if wanted is None:
        return files
    return [path for path in files if any(path == each or path.startswith(each.rstrip("/") + "/") for each in wanted)]


def _types_pass(copy: Path, path: str) -> bool:
    command = [sys.executable, "-m", "mypy", "--no-error-summary", path]
    return subprocess.run(command, cwd=copy, check=False, capture_output=True).returncode == 0


def _copy_tree(target: Path) -> Path:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
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
    parser.add_argument("--record", action="store_true", help="Append the figures to ops/bench/results/mutants.jsonl.")
    parser.add_argument("--serious", action="store_true", help="Try the mutants of serious.toml, and no sample.")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
