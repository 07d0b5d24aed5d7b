"""Which tests run which lines, from one run of a room's tests under coverage: a mutant meets only tests that can fail.

Lines that run while a module is imported belong to no test; a line that no test runs needs no test to be tried.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections import defaultdict
from pathlib import Path

from coverage import CoverageData
from coverage.parser import PythonParser

DURATION = re.compile(r"([\d.]+)s (?:call|setup|teardown) +(\S.*)")
FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+::.*?)(?: - .*)?$", re.MULTILINE)
# Enough for a mutant: tests are tried from the mirrored file first, then the fastest.
MAX_SECONDS = 40.0


class CoveringTests:
    """The tests of one room, by the lines that they run."""

    def __init__(self, copy: Path, tests: list[str], data_file: Path) -> None:
        """Run the room's tests in a copy of the tree, and collect what they run, unless `data_file` has it already.

        Coverage makes the code slower and larger, which tests of times and memory notice: these are not used.

        Raises:
            RuntimeError: The tests could not be run.
        """
        self._root = copy
        self._data_file = data_file
        said = data_file.with_name(f"{data_file.name}.txt")
        if not said.exists():
            said.write_text(_run_tests(copy, tests, data_file))
        output = said.read_text()
        self._durations: dict[str, float] = defaultdict(float)
        for seconds, test in DURATION.findall(output):
            self._durations[test] += float(seconds)
        self._failed = set(FAILED.findall(output))
        self._by_file: dict[str, tuple[PythonParser, dict[int, set[str]]]] = {}
        self._lock = threading.Lock()

    @property
    def failed(self) -> list[str]:
        """Tests that failed without a mutant."""
        return sorted(self._failed)

    def of(self, path: str, lines: range) -> list[str] | None:
        """Return the tests that run one of the lines, best first; None for lines that run at import."""
        with self._lock:
            parser, contexts_of = self._file(path)
        contexts = set[str]().union(*(contexts_of.get(parser.first_line(line), set()) for line in lines))
        tests = {context.rpartition("|")[0] for context in contexts if context}
        if contexts and not tests:
            return None
        tests -= self._failed
        mirrored = mirrored_test(path)
        ordered = sorted(tests, key=lambda test: (not test.startswith(mirrored), self._durations[test]))
        chosen: list[str] = []
        seconds = 0.0
        for test in ordered:
            seconds += self._durations[test]
            if chosen and seconds > MAX_SECONDS:
                break
            chosen.append(test)
        return chosen

    def _file(self, path: str) -> tuple[PythonParser, dict[int, set[str]]]:
        if path not in self._by_file:
            parser = PythonParser(text=(self._root / path).read_text())
            parser.parse_source()
            data = CoverageData(str(self._data_file))
            data.read()
            by_line: dict[int, set[str]] = defaultdict(set)
            for line, contexts in data.contexts_by_lineno(str((self._root / path).resolve())).items():
                by_line[parser.first_line(line)].update(contexts)
            self._by_file[path] = parser, by_line
        return self._by_file[path]


def _run_tests(copy: Path, tests: list[str], data_file: Path) -> str:
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider", *tests]
    command += ["--cov", "--cov-context=test", "--cov-report=", "--durations=0", "--durations-min=0.02", "-vv"]
    environment = {**os.environ, "COVERAGE_FILE": str(data_file)}
    ended = subprocess.run(command, cwd=copy, env=environment, check=False, capture_output=True, text=True)
    if ended.returncode not in (0, 1):
        raise RuntimeError(f"pytest ended with {ended.returncode}:\n{ended.stdout[-4000:]}{ended.stderr[-4000:]}")
    return ended.stdout


def mirrored(path: str, with_neighbours: bool) -> list[str]:
    """Return where the tests of a file are, and those of its folder if wanted, if there are any."""
    file = Path(mirrored_test(path))
    wanted = file.parent if with_neighbours else file
    return [str(wanted)] if wanted.exists() else []


def mirrored_test(path: str) -> str:
    """Return where the tests of a file are, by the convention of the tree."""
    folder, name = path.rsplit("/", 1)
    return f"tests/{folder}/test_{name}"
