"""`make mutants`: a sample of mutants, each run against the tests that run its lines; survivors are missing assertions.

First the tests of the room run once under coverage, then the mutants meet them, and then mypy, since `make lint` has to
pass too. Works on copies of the tree, one for each job. Ends after `--minutes`, or when the sample is used up. Mutants
that no test can notice, because they do the same, are listed with the reason in `equivalent.toml`.
"""

from __future__ import annotations

import argparse
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

from tests.mutation.covering import CoveringTests
from tests.mutation.mutants import Mutant, MutantSource
from tests.mutation.runner import TestRunner

ROOT = Path(__file__).resolve().parents[2]
EQUIVALENT = Path(__file__).with_name("equivalent.toml")
PYTEST = ["-x", "-q", "--no-header", "-p", "no:cacheprovider", "--timeout=60"]
GOAL = 0.9

# Which tests look after which room.
ROOMS = {
    "gateway": ["tests/gateway"],
    "gpu_worker/core": ["tests/gpu_worker/core", "tests/gpu_worker/engine/test_engine.py"],
    "gpu_worker/consumer": ["tests/gpu_worker/consumer"],
    "shared": ["tests/shared", "tests/gpu_worker/consumer", "tests/gateway"],
}


@dataclass(slots=True)
class _Count:
    """What became of the mutants of a file."""

    killed: int = 0
    ill_typed: int = 0
    equivalent: int = 0
    survived: list[Mutant] = field(default_factory=list)


class Run:
    """One run: the sample still to do, and what became of the rest. Its threads share it under one lock."""

    def __init__(self, options: argparse.Namespace) -> None:
        """Choose the sample."""
        self._lock = threading.Lock()
        self._until = time.monotonic() + options.minutes * 60
        self._covering: dict[str, CoveringTests] = {}
        self._rooms = {room: options.tests or tests for room, tests in ROOMS.items() if room.startswith(options.only)}
        self._equivalent = {(e["path"], e["before"], e["after"]) for e in _equivalents()}
        self._seen: set[tuple[str, str, str]] = set()
        files = {room: _chosen(room, options.file) for room in self._rooms}
        self._rooms = {room: tests for room, tests in self._rooms.items() if files[room]}
        self.counts = {path: _Count() for room in self._rooms for path in files[room]}
        sources = [(room, MutantSource(ROOT, path)) for room in self._rooms for path in files[room]]
        self._sample = [(room, source, index) for room, source in sources for index in range(len(source))]
        self.num_mutants = len(self._sample)
        random.Random(options.seed).shuffle(self._sample)

    def learn_coverage(self, copy: Path, directory: Path) -> None:
        """Run the tests of each room without a mutant."""
        for room, tests in self._rooms.items():
            self._covering[room] = CoveringTests(copy, tests, directory / f"coverage-{room.replace('/', '-')}")
            for failed in self._covering[room].wait():
                print(f"fails without a mutant and is left out: {failed}", flush=True)

    def work(self, copy: Path) -> None:
        """Test mutants in a copy of the tree until there are none, or no time, left."""
        runner = TestRunner(copy)
        while (chosen := self._take()) is not None:
            room, mutant = chosen
            tests = self._covering[room].of(mutant.path, mutant.lines)
            target = copy / mutant.path
            original = target.read_text()
            target.write_text(mutant.source)
            is_killed = tests != [] and not runner.passes([*PYTEST, *(self._rooms[room] if tests is None else tests)])
            is_ill_typed = not is_killed and not _types_pass(copy, mutant.path)
            target.write_text(original)
            with self._lock:
                count = self.counts[mutant.path]
                if is_killed:
                    count.killed += 1
                elif is_ill_typed:
                    count.ill_typed += 1
                else:
                    count.survived.append(mutant)
                    print(f"survived{'' if tests != [] else ' (no test runs it)'}: {mutant}", flush=True)
        runner.close()

    def _take(self) -> tuple[str, Mutant] | None:
        with self._lock:
            while self._sample and time.monotonic() < self._until:
                room, source, index = self._sample.pop()
                mutant = source.mutant(index)
                key = (mutant.path, mutant.before, mutant.after)
                if key in self._seen or mutant.before == mutant.after:
                    continue
                self._seen.add(key)
                if key in self._equivalent:
                    self.counts[mutant.path].equivalent += 1
                    continue
                return room, mutant
        return None


def main() -> int:
    """Run the sample and print what became of it; 1 when fewer than nine in ten were noticed."""
    options = _options()
    run = Run(options)
    print(f"{run.num_mutants} mutants; {options.minutes:g} minutes, seed {options.seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="headrace-mutants-") as directory:
        copies = [_copy_tree(Path(directory) / str(index)) for index in range(options.jobs)]
        run.learn_coverage(copies[0], Path(directory))
        threads = [threading.Thread(target=run.work, args=(copy,)) for copy in copies]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return _report(run.counts)


def _report(counts: dict[str, _Count]) -> int:
    print(f"\n{'file':40}{'tests':>8}{'types':>8}{'survived':>10}{'equivalent':>12}{'noticed':>10}")
    noticed = tested = 0
    for path, count in counts.items():
        num_noticed = count.killed + count.ill_typed
        num_tested = num_noticed + len(count.survived)
        if not num_tested and not count.equivalent:
            continue
        noticed, tested = noticed + num_noticed, tested + num_tested
        share = f"{num_noticed / num_tested:.0%}" if num_tested else "-"
        columns = f"{count.killed:8}{count.ill_typed:8}{len(count.survived):10}{count.equivalent:12}{share:>10}"
        print(f"{path:40}{columns}")
    share = noticed / tested if tested else 0.0
    print(f"{'all':40}{noticed:16}{tested - noticed:10}{'':12}{share:10.0%}   (goal {GOAL:.0%})")
    return 0 if share >= GOAL else 1


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


def _equivalents() -> list[dict[str, str]]:
    entries: list[dict[str, str]] = tomllib.loads(EQUIVALENT.read_text()).get("mutant", [])
    for entry in entries:
        if set(entry) != {"path", "before", "after", "why"}:
            raise SystemExit(f"{EQUIVALENT.name}: an entry has path, before, after and why, not {sorted(entry)}")
        source = ROOT / entry["path"]
        lines = " ".join(map(str.strip, source.read_text().splitlines())) if source.exists() else ""
        if entry["before"] not in lines:
            raise SystemExit(f"{EQUIVALENT.name}: {entry['path']} has no line {entry['before']!r}; mend the entry")
    return entries


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--minutes", type=float, default=30.0, help="Time for the whole sample.")
    parser.add_argument("--jobs", type=int, default=2, help="Mutants tested at once.")
    parser.add_argument("--seed", type=int, default=0, help="Which sample.")
    parser.add_argument("--only", default="", help="A room: " + ", ".join(ROOMS))
    parser.add_argument(
        "--file", nargs="+", help="Files or folders, such as gateway/http1 gateway/admission/limits.py."
    )
    parser.add_argument("--tests", nargs="+", help="Instead of all the tests of the room.")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
