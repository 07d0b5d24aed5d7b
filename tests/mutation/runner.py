"""Runs tests again and again, each time in a child of a process that has imported everything but the project.

Importing takes longer than most tests. Reads one JSON list of pytest's arguments per line, and answers each with how
its run ended. Started in the copy of the tree whose tests it runs.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import astuple, dataclass
from pathlib import Path

import pytest

RUN_TIMEOUT_S = 300.0
_POLL_S = 0.01
_NO_TESTS = 5
_OF_TIME = re.compile(r"[\w.]*Timeout\w*\b|Failed: Timeout \(>")
_PRELOADED = (
    "hypothesis.stateful",
    "nats.aio.client",
    "nats.js",
    "msgspec",
    "httptools",
    "uvloop",
    "prometheus_client",
    "pytest_asyncio",
    "pytest_timeout",
    "starlette.applications",
    "tokenizers",
    "numpy",
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run of tests ended.

    Attributes:
        status: pytest's exit status, negative where a signal ended the process; None where the run's time was over.
        failed: The first test or file that failed; the one that was running where the process or its time ended.
        is_of_time: Whether it failed since something took too long.
    """

    status: int | None
    failed: str | None
    is_of_time: bool

    @property
    def has_passed(self) -> bool:
        """Whether no test failed; there may have been none."""
        return self.status in (0, _NO_TESTS)


class TestRunner:
    """Owns the process for one copy of the tree."""

    __test__ = False

    def __init__(self, copy: Path) -> None:
        """Start the process in `copy`."""
        self._process = subprocess.Popen(
            # Without bytecode files: they are told apart by second and size, and mutants come faster.
            [sys.executable, "-B", "-m", __name__],
            cwd=copy,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, arguments: list[str]) -> Outcome:
        """Run pytest with these arguments."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(arguments) + "\n")
        self._process.stdin.flush()
        return Outcome(*json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


def main() -> None:
    """Serve until the input ends."""
    for name in _PRELOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    answers = os.fdopen(os.dup(1), "w")
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (1, 2):
        os.dup2(nowhere, descriptor)
    for line in sys.stdin:
        with tempfile.TemporaryFile() as notes:
            status = _status(json.loads(line), notes.fileno())
            notes.seek(0)
            outcome = outcome_of(status, notes.read().decode().splitlines())
        print(json.dumps(astuple(outcome)), file=answers, flush=True)


def outcome_of(status: int | None, notes: Iterable[str]) -> Outcome:
    """Read what the plugin wrote: the first failure, or what was running when the run ended."""
    running: str | None = None
    for line in notes:
        what, name = line.split(" ", 1)
        if what in ("failed", "late"):
            return Outcome(status, name, what == "late")
        running = name if what == "started" else None
    if status in (0, _NO_TESTS):
        return Outcome(status, None, is_of_time=False)
    return Outcome(status, running, is_of_time=status is None)


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
            is_of_time = crash is not None and _OF_TIME.match(crash.message) is not None
            self._write("late" if is_of_time else "failed", report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._write("failed", report.nodeid)

    def _write(self, what: str, name: str) -> None:
        os.write(self._descriptor, f"{what} {name}\n".encode())


def _status(arguments: list[str], notes: int) -> int | None:
    child = os.fork()
    if child == 0:
        os.setsid()
        # The plugins are imported already, so that pytest cannot rewrite their assertions.
        options = ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
        os._exit(pytest.main([*arguments, *options], plugins=[_Notes(notes)]))
    until = time.monotonic() + RUN_TIMEOUT_S
    while time.monotonic() < until:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(_POLL_S)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


if __name__ == "__main__":
    main()
