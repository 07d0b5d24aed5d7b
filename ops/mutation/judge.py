"""Decides whether tests notice a mutant: a test has to fail with it twice, and to pass without it once."""

from __future__ import annotations

import ast
import enum
import re
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

from ops.mutation.fork import changed_file, run_forked

# A mutant of a file that many import would meet the whole suite.
_MAX_IMPORTING_FILES = 12


class CoveringTests:
    """The test files of the tree by the modules that they import."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._importing: dict[str, set[str]] = defaultdict(set)
        for path in sorted((root / "tests").rglob("test_*.py")):
            for module in _imported(path):
                self._importing[module].add(str(path.relative_to(root)))

    def of(self, path: str) -> list[list[str]]:
        """Return the tests of a file in stages: the mirrored ones, those that import it, and the mirrored folder's."""
        folder, name = path.removesuffix(".py").rsplit("/", 1)
        mirrored = [f"tests/{folder}/test_{name}.py", *self._files(f"tests/{folder}", f"test_{name}_*.py")]
        importing = sorted(
            self._importing[path.removesuffix(".py").replace("/", ".")],
            key=lambda test: (-_num_shared(test, path), test),
        )
        stages, seen = [], set[str]()
        for tests in (mirrored, importing[:_MAX_IMPORTING_FILES], self._of_folder(f"tests/{folder}")):
            stages.append([test for test in tests if test not in seen and (self._root / test).exists()])
            seen.update(stages[-1])
        return [stage for stage in stages if stage]

    def _of_folder(self, folder: str) -> list[str]:
        """Return the test files of a folder, or of the nearest folder around it that has some."""
        found: list[str] = []
        while not found and "/" in folder:
            found = self._files(folder, "test_*.py")
            folder = folder.rpartition("/")[0]
        return found

    def _files(self, folder: str, pattern: str) -> list[str]:
        return sorted(str(path.relative_to(self._root)) for path in (self._root / folder).glob(pattern))


def _imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def _num_shared(test: str, path: str) -> int:
    """Count the leading folders that a test and a file share."""
    pairs = zip(test.split("/")[1:], path.split("/"), strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), 0)


# Without rewritten assertions, so that test files are read from bytecode too.
_PYTEST = ("-x", "-q", "--no-header", "--tb=line", "-rfE", "-p", "no:cacheprovider", "--assert=plain", "--timeout=60")
_RETRY_S = 130.0
# A test may fail once and pass alone, such as the one that ran when the time was over.
_MAX_RETRIES = 4
_LATE = re.compile(r"[\w.]*Timeout\w*\b|Failed: Timeout \(>")
# A call with other arguments than it takes, a tuple of another length, a name that is not there: any test that runs the
# line fails, whatever it asserts.
_CRASHED = re.compile(
    r"TypeError: .*(missing \d+ required|required (positional )?argument|takes .*arguments?\b|expected .*arguments?\b)"
    r"|ValueError: (not enough|too many) values to unpack|NameError:|UnboundLocalError:|ImportError:"
)
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+?\.py(?:::[^\s\[]+(?:\[.*?\])?)?)(?= - |$)", re.MULTILINE)
_RAISED = re.compile(r"^(?:E +)?(\S+\.py):\d+: (.*)$", re.MULTILINE)


class Verdict(enum.StrEnum):
    """What became of a mutant: noticed by a failure, a time-out or mypy, not at all, or not counted."""

    TESTS = "tests"
    TIME = "time"
    TYPES = "types"
    SURVIVED = "survived"
    CRASHED = "crashed"
    EQUIVALENT = "equivalent"
    # The time was over before the tests were.
    UNFINISHED = "unfinished"


class Failure(NamedTuple):
    """What a failure makes of the mutant, and the test, or the file that cannot be collected."""

    verdict: Verdict
    test: str


class Judge:
    """Judges mutants in one copy of the tree, which it leaves as it was."""

    def __init__(self, copy: Path) -> None:
        self._copy = copy
        # Tests that fail without a mutant too.
        self._unsound: set[str] = set()
        # Tests that have passed without a mutant.
        self._sound: set[str] = set()

    def failure(self, path: str, mutated: str, tests: list[str], seconds: float) -> Failure | None:
        """Run tests with the changed text of a file for `seconds`, and return the first that notices it."""
        until = time.monotonic() + seconds
        left_out = set(self._unsound)
        for _ in range(_MAX_RETRIES):
            options = [part for test in sorted(left_out) for part in ("--deselect", test)]
            with changed_file(self._copy / path, mutated):
                failed = self._run([*tests, *options], until - time.monotonic())
                if failed is None or failed.verdict is Verdict.UNFINISHED:
                    return failed
                again = self._run_alone(failed.test)
            left_out.add(failed.test)
            if again is not None:
                is_known = failed.test in self._sound and again.verdict is not Verdict.TIME
                if is_known or self._run_alone(failed.test) is None:
                    self._sound.add(failed.test)
                    return again
                self._unsound.add(failed.test)
                print(f"fails without a mutant too and is left out: {failed.test}", flush=True)
        return Failure(Verdict.UNFINISHED, tests[-1])

    def _run_alone(self, test: str) -> Failure | None:
        """Run one test; of a file only see whether it can be collected."""
        return self._run([test] if "::" in test else ["--collect-only", test], _RETRY_S)

    def _run(self, arguments: list[str], seconds: float) -> Failure | None:
        finished = run_forked(self._copy, lambda: pytest.main([*_PYTEST, *arguments]), max(0.0, seconds))
        return first_failure(*finished, arguments[-1]) if finished else Failure(Verdict.UNFINISHED, arguments[-1])


def first_failure(status: int, output: str, asked: str) -> Failure | None:
    """Read what pytest printed; None if no test failed. `asked` stands for the test where pytest names none."""
    # 5: all tests were left out.
    if status in (0, 5):
        return None
    test, raised = _FAILED.search(output), _RAISED.findall(output)
    verdict = verdict_of(raised[-1][1], Path(raised[-1][0])) if raised else Verdict.TESTS
    return Failure(verdict, asked if test is None else test[1])


def verdict_of(message: str, path: Path) -> Verdict:
    """Return what a failed test makes of the mutant, by its exception's message and the file that raised it.

    A test that takes a result apart asserts something by that.
    """
    if _LATE.match(message):
        return Verdict.TIME
    return Verdict.CRASHED if _CRASHED.match(message) and not path.name.startswith("test_") else Verdict.TESTS


GOAL = 0.9
# Mutants whose tests ran out of time say nothing: with more of them the rate is of the easy ones.
MAX_UNFINISHED = 0.1
_WITHOUT_EFFECT = (Verdict.CRASHED, Verdict.EQUIVALENT)


def share_noticed(counts: Counter[Verdict]) -> float | None:
    """Return the share of the judged mutants that tests or mypy noticed; None if no mutant was judged."""
    num_judged = _num_with_effect(counts) - counts[Verdict.UNFINISHED]
    return 1 - counts[Verdict.SURVIVED] / num_judged if num_judged else None


def share_unfinished(counts: Counter[Verdict]) -> float:
    """Return the share of the mutants with an effect whose tests ran out of time; 0 if there is no such mutant."""
    return counts[Verdict.UNFINISHED] / max(1, _num_with_effect(counts))


def is_goal_reached(counts: Counter[Verdict]) -> bool:
    """Whether a room's tests noticed enough of its mutants, and came to their end with nearly all of them."""
    share = share_noticed(counts)
    return (share is None or share >= GOAL) and share_unfinished(counts) <= MAX_UNFINISHED


def report(rooms: Mapping[str, Counter[Verdict]]) -> str:
    """Return the table of all rooms, and a last line that names those that missed the goal."""
    lines = [f"{'room':30}" + "".join(f"{verdict:>11}" for verdict in Verdict) + f"{'no end':>8}{'noticed':>9}"]
    for room, counts in rooms.items():
        share = share_noticed(counts)
        shown = "".join(f"{counts[verdict]:11}" for verdict in Verdict) + f"{share_unfinished(counts):>8.0%}"
        lines.append(f"{room:30}{shown}{'-' if share is None else f'{share:.0%}':>9}")
    missed = [room for room, counts in rooms.items() if not is_goal_reached(counts)]
    goal = f"goal: {GOAL:.0%} of each room noticed, at most {MAX_UNFINISHED:.0%} unfinished"
    return "\n".join([*lines, f"{goal}; missed: {', '.join(missed) or 'none'}"])


def _num_with_effect(counts: Counter[Verdict]) -> int:
    return counts.total() - sum(counts[verdict] for verdict in _WITHOUT_EFFECT)
