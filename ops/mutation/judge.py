"""Decides whether tests notice a mutant: a test has to fail with it twice, and to pass without it once.

Runs pytest in children of a process that has imported everything but the project, since importing takes longer than
most tests. `python -m ops.mutation.judge` is that process: it reads a JSON list per line, seconds and pytest's
arguments, and answers with the first test that failed and how.
"""

from __future__ import annotations

import contextlib
import enum
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

_PYTEST = ["-x", "-q", "--no-header", "-p", "no:cacheprovider", "--timeout=60"]
_RETRY_S = 130.0
# A test may fail once and pass alone, such as the one that ran when the time was over.
_MAX_RETRIES = 4
_POLL_S = 0.01
_NO_TESTS = 5
_LATE = re.compile(r"[\w.]*Timeout\w*\b|Failed: Timeout \(>")
# A call with other arguments than it takes, a tuple of another length, a name that is not there: any test that runs the
# line fails, whatever it asserts.
_CRASHED = re.compile(
    r"TypeError: .*(missing \d+ required|required (positional )?argument|takes .*arguments?\b|expected .*arguments?\b)"
    r"|ValueError: (not enough|too many) values to unpack|NameError:|UnboundLocalError:|ImportError:"
)
_PRELOADED = (
    "hypothesis.stateful",
    "nats.aio.client",
    "nats.js",
    "anyio",
    "jinja2",
    "openai",
    "uvloop",
    "prometheus_client",
    "pytest_asyncio",
    "pytest_timeout",
    "starlette.applications",
    "tokenizers",
    "torch",
    "triton",
    "safetensors.torch",
)


class Kind(enum.StrEnum):
    """How a test failed: something was wrong, took too long, or could not run at all."""

    FAILED = "failed"
    LATE = "late"
    CRASHED = "crashed"


@dataclass(frozen=True, slots=True)
class Failure:
    """A failed test.

    Attributes:
        test: Its name; that of its file if the file cannot be collected.
        kind: How it failed.
    """

    test: str
    kind: Kind


class Judge:
    """Judges mutants in one copy of the tree, which it leaves as it was. Owns the process that runs the tests."""

    def __init__(self, copy: Path) -> None:
        """Start the process in `copy`."""
        self._copy = copy
        # Tests that fail without a mutant too.
        self._unsound: set[str] = set()
        # Tests that have passed without a mutant.
        self._sound: set[str] = set()
        # No bytecode files: Python tells them apart by second and size, and mutants come faster.
        environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
        if not any(Path("/dev").glob("nvidia[0-9]*")):
            environment["TRITON_INTERPRET"] = "1"
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            cwd=copy,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def failure(self, path: str, mutated: str, tests: list[str], seconds: float) -> Failure | None:
        """Run tests with a changed file, and return the first that notices it.

        Args:
            path: The file.
            mutated: Its changed text.
            tests: What pytest runs.
            seconds: Tests that have not run by then are not run.
        """
        until = time.monotonic() + seconds
        target = self._copy / path
        original = target.read_text()
        left_out = set(self._unsound)
        try:
            for _ in range(_MAX_RETRIES):
                target.write_text(mutated)
                options = [part for test in sorted(left_out) for part in ("--deselect", test)]
                left_s = until - time.monotonic()
                if left_s < 0 or (failed := self._run([*tests, *options], left_s)) is None:
                    return None
                left_out.add(failed.test)
                if (again := self._run_alone(failed.test)) is not None:
                    if failed.test in self._sound and again.kind is not Kind.LATE:
                        return again
                    target.write_text(original)
                    if self._run_alone(failed.test) is None:
                        self._sound.add(failed.test)
                        return again
                    self._unsound.add(failed.test)
                    print(f"fails without a mutant too and is left out: {failed.test}", flush=True)
            return None
        finally:
            target.write_text(original)

    def _run_alone(self, test: str) -> Failure | None:
        """Run one test; of a file only see whether it can be collected."""
        return self._run([test] if "::" in test else ["--collect-only", test], _RETRY_S)

    def _run(self, arguments: list[str], seconds: float) -> Failure | None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([seconds, *_PYTEST, *arguments]) + "\n")
        self._process.stdin.flush()
        failed = json.loads(self._process.stdout.readline())
        return None if failed is None else Failure(failed[0] or arguments[0], Kind(failed[1]))

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


def first_failure(status: int | None, notes: Iterable[str]) -> tuple[str | None, Kind] | None:
    """Read pytest's exit status and the plugin's notes.

    Args:
        status: Negative if a signal ended pytest; None if its time was over.
        notes: One line per event: `started`, `ended` or a kind of failure, and a test.

    Returns:
        The test that failed, or that was running when the process died or its time was over, and how it failed; None if
        none failed. The test is None if pytest itself failed.
    """
    running: str | None = None
    for line in notes:
        what, name = line.split(" ", 1)
        if what in tuple(Kind):
            return name, Kind(what)
        running = name if what == "started" else None
    if status in (0, _NO_TESTS) or (status is None and running is None):
        return None
    return running, Kind.LATE if status is None else Kind.FAILED


def kind_of(message: str, path: Path) -> Kind:
    """Tell how a test failed.

    Args:
        message: Of its exception, which begins with the exception's name.
        path: The file that raised it. A test that takes a result apart asserts something by that.
    """
    if _LATE.match(message):
        return Kind.LATE
    return Kind.CRASHED if _CRASHED.match(message) and not path.name.startswith("test_") else Kind.FAILED


class _Notes:
    """A plugin that writes which tests start, end and fail."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._write("started", nodeid)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._write("ended", nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            kind = kind_of(crash.message, Path(crash.path)) if crash is not None else Kind.FAILED
            self._write(kind, report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._write("failed", report.nodeid)

    def _write(self, what: str, name: str) -> None:
        os.write(self._descriptor, f"{what} {name}\n".encode())


def _exit_status(arguments: list[str], seconds: float, notes: int) -> int | None:
    """Run pytest in a child; None if it takes longer than `seconds`."""
    child = os.fork()
    if child == 0:
        # The plugins are imported already, so that pytest cannot rewrite their assertions.
        options = ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
        os._exit(pytest.main([*arguments, *options], plugins=[_Notes(notes)]))
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(_POLL_S)
    kill_with_descendants(child)
    os.waitpid(child, 0)
    return None


def kill_with_descendants(child: int) -> None:
    """Kill a process and all that it started, systems in sessions of their own too."""
    process = psutil.Process(child)
    # Nothing new is started while the others are looked up.
    process.suspend()
    for descendant in [*process.children(recursive=True), process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            descendant.kill()


def _serve() -> None:
    for name in _PRELOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    answers = os.fdopen(os.dup(1), "w")
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (1, 2):
        os.dup2(nowhere, descriptor)
    for line in sys.stdin:
        seconds, *arguments = json.loads(line)
        with tempfile.TemporaryFile() as notes:
            status = _exit_status(arguments, seconds, notes.fileno())
            notes.seek(0)
            failed = first_failure(status, notes.read().decode().splitlines())
        print(json.dumps(failed), file=answers, flush=True)


if __name__ == "__main__":
    _serve()
