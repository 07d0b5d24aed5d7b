"""Decides whether tests notice a mutant: one of them has to fail with it twice, and then to pass without it.

On a busy machine a test may fail for no reason but that. What fails since something took too long is tried again while
no other mutant is, and counted apart: a mutant that waits for ever is noticed, a test that was slow is not. Where tests
are late again and again and pass alone, the machine has no time for more, and nothing was noticed.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.mutation.runner import TestRunner

MAX_LATE_TESTS = 3
PYTEST = ["-x", "-q", "--no-header", "-p", "no:cacheprovider", "--timeout=60"]


@dataclass(frozen=True, slots=True)
class Notice:
    """A test fails with a mutant, and only with it.

    Attributes:
        test: Its name; a file's, where its tests cannot be collected.
        is_of_time: Whether it fails since something takes too long.
    """

    test: str
    is_of_time: bool


class Turns:
    """Runs of tests that may be side by side, and those that have the machine for themselves."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_running = 0
        self._is_taken = False

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: not self._is_taken)
            self._num_running += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_running -= 1
                self._changed.notify_all()

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: not self._is_taken)
            self._is_taken = True
            self._changed.wait_for(lambda: self._num_running == 0)
        try:
            yield
        finally:
            with self._changed:
                self._is_taken = False
                self._changed.notify_all()


class Judge:
    """Judges mutants in one copy of the tree, which it leaves as it was."""

    def __init__(self, copy: Path, turns: Turns) -> None:
        self._copy = copy
        self._turns = turns
        self._runner = TestRunner(copy)
        # Tests that failed without a mutant when they were tried alone.
        self._unsound: set[str] = set()

    def notice(self, path: str, mutated: str, tests: list[str]) -> Notice | None:
        """Run tests with a changed file, and return which of them notices it."""
        target = self._copy / path
        original = target.read_text()
        left_out = set(self._unsound)
        num_late = 0
        try:
            while num_late < MAX_LATE_TESTS:
                target.write_text(mutated)
                failed = self._failure([test for test in tests if test not in left_out], left_out)
                if failed is None:
                    return None
                if (again := self._again(failed)) is not None:
                    target.write_text(original)
                    if self._again(failed) is None:
                        return again
                    self._unsound.add(failed.test)
                    print(f"fails without a mutant too and is left out: {failed.test}", flush=True)
                left_out.add(failed.test)
                num_late += failed.is_of_time
            return None
        finally:
            target.write_text(original)

    def _failure(self, tests: list[str], left_out: set[str]) -> Notice | None:
        if not tests:
            return None
        options = [part for test in sorted(left_out) for part in ("--deselect", test)]
        with self._turns.together():
            outcome = self._runner.run([*PYTEST, *tests, *options])
        if outcome.has_passed:
            return None
        # Nothing ran where a file that all tests need cannot be imported: the first test shows that as well.
        return Notice(outcome.failed or tests[0], outcome.is_of_time)

    def _again(self, failed: Notice) -> Notice | None:
        """Run one test, with the machine for itself if it was late; of a file only see whether it can be collected."""
        options = [] if "::" in failed.test else ["--collect-only"]
        with self._turns.alone() if failed.is_of_time else self._turns.together():
            outcome = self._runner.run([*PYTEST, *options, failed.test])
        return None if outcome.has_passed else Notice(failed.test, outcome.is_of_time)

    def close(self) -> None:
        """End the process that runs the tests."""
        self._runner.close()
