"""One run over a sample: several jobs, each with a copy of the tree, take mutants until none or no time is left."""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.mutation.covering import CoveringTests, mirrored
from tests.mutation.equivalent import equivalent_mutants
from tests.mutation.judge import Judge, Turns
from tests.mutation.mutant import Mutant
from tests.mutation.sample import ALSO, READING, ROOMS, WITH_PROCESSES, choose, files_of
from tests.mutation.verdicts import Count, KeptVerdicts, Verdict


class Run:
    """The sample still to do, and what became of the rest. Its threads share it under one lock."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        """Choose the sample; count what earlier pieces found."""
        self._lock = threading.Lock()
        self._turns = Turns()
        self._folder = folder
        self._seconds = options.minutes * 60
        self._until = 0.0
        self._tests_of = dict.fromkeys(ROOMS, options.tests) if options.tests else ROOMS
        self._covering: dict[str, CoveringTests] = {}
        self._kept = KeptVerdicts(folder)
        self.rooms = [room for room in ROOMS if room.startswith(options.only) and files_of(room, options.file)]
        self.counts: dict[str, dict[str, Count]] = {room: {} for room in self.rooms}
        chosen = [
            (room, mutant)
            for room in self.rooms
            for mutant in choose(files_of(room, options.file), options.sample, options.seed)
        ]
        random.Random(options.seed).shuffle(chosen)
        self.size = len(chosen)
        same = {(each.path, each.before, each.after) for each in equivalent_mutants()}
        self._left: list[tuple[str, Mutant]] = []
        for room, mutant in chosen:
            known = self._kept.of(room, mutant)
            if (mutant.path, mutant.before, mutant.after) in same:
                self._count(room, mutant).add(Verdict.EQUIVALENT)
            elif known is None or (options.again and known is Verdict.SURVIVED):
                self._left.append((room, mutant))
            else:
                self._count(room, mutant).add(known)

    @property
    def num_left(self) -> int:
        """Mutants that were not tried."""
        return len(self._left)

    def learn_coverage(self, copy: Path, jobs: int) -> None:
        """Run the tests of each room without a mutant, so many rooms at once."""
        open_rooms = [room for room in self.rooms if any(room == each for each, _ in self._left)]
        rooms = list(dict.fromkeys(each for room in open_rooms for each in (room, *ALSO.get(room, ()))))
        by_tests = {tuple(self._tests_of[room]): room for room in reversed(rooms)}
        files = {tests: self._folder / f"coverage-{room.replace('/', '-')}" for tests, room in by_tests.items()}
        with ThreadPoolExecutor(jobs) as pool:
            learnt = dict(pool.map(lambda tests: (tests, CoveringTests(copy, list(tests), files[tests])), by_tests))
        self._covering = {room: learnt[tuple(self._tests_of[room])] for room in rooms}
        for covering in learnt.values():
            for failed in covering.failed:
                print(f"fails without a mutant and is left out: {failed}", flush=True)
        if self._left and not _types_pass(copy, sorted({mutant.path for _, mutant in self._left})):
            raise SystemExit("mypy fails without a mutant; mend that first")

    def start_clock(self) -> None:
        """Begin to count the minutes: what was needed before the first mutant takes none of them."""
        self._until = time.monotonic() + self._seconds

    def work(self, copy: Path) -> None:
        """Judge mutants in a copy of the tree until there are none, or no time, left."""
        judge = Judge(copy, self._turns)
        while (taken := self._take()) is not None:
            room, mutant = taken
            tests = self._tests(room, mutant)
            verdict, test = self._verdict(judge, copy, taken, tests)
            with self._lock:
                self._count(room, mutant).add(verdict)
                self._kept.keep(room, mutant, verdict, test)
                if verdict is Verdict.SURVIVED:
                    print(f"survived {len(tests)} tests: {mutant}", flush=True)
        judge.close()

    def _verdict(
        self, judge: Judge, copy: Path, taken: tuple[str, Mutant], tests: list[str]
    ) -> tuple[Verdict, str | None]:
        room, mutant = taken
        notice = judge.notice(mutant.path, mutant.source, tests)
        if notice is None:
            target = copy / mutant.path
            original = target.read_text()
            target.write_text(mutant.source)
            has_types = _types_pass(copy, [mutant.path])
            target.write_text(original)
            if not has_types:
                return Verdict.TYPES, None
            notice = judge.notice(mutant.path, mutant.source, mirrored(mutant.path, room in WITH_PROCESSES))
        if notice is None:
            return Verdict.SURVIVED, None
        return Verdict.TIME if notice.is_of_time else Verdict.TESTS, notice.test

    def _tests(self, room: str, mutant: Mutant) -> list[str]:
        """Return the tests that run a mutant's lines; all of the room where they run at import."""
        found = [self._covering[each].of(mutant.path, mutant.lines) for each in (room, *ALSO.get(room, ()))]
        if None in found:
            return self._tests_of[room]
        running = dict.fromkeys(test for tests in found for test in tests or ())
        return [*running, *READING.get(room, ())]

    def _take(self) -> tuple[str, Mutant] | None:
        with self._lock:
            return self._left.pop() if self._left and time.monotonic() < self._until else None

    def _count(self, room: str, mutant: Mutant) -> Count:
        return self.counts[room].setdefault(mutant.path, Count())


def _types_pass(copy: Path, paths: list[str]) -> bool:
    command = [sys.executable, "-m", "mypy", "--no-error-summary", *paths]
    return subprocess.run(command, cwd=copy, check=False, capture_output=True).returncode != 1
