"""Runs tests again and again, each time in a child of a process that has imported everything but the project.

Importing takes longer than most tests. Reads one JSON list of pytest's arguments per line, and answers each with the
exit status of its run and the first test that failed. Started in the copy of the tree whose tests it runs.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

RUN_TIMEOUT_S = 300.0
_POLL_S = 0.01
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

    def failure(self, options: list[str], tests: list[str]) -> str | None:
        """Run tests, and return the first that fails; those that do not end in time fail.

        A test that fails has to fail twice: on a busy machine some fail for no reason but that.
        """
        arguments = [*options, *tests]
        while tests:
            status, failed = self._run(arguments)
            if status == 0:
                return None
            if failed is None or self._run([*options, failed])[0] != 0:
                return failed or f"pytest's status {status}"
            arguments += ["--deselect", failed]
        return None

    def _run(self, arguments: list[str]) -> tuple[int, str | None]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(arguments) + "\n")
        self._process.stdin.flush()
        status, failed = json.loads(self._process.stdout.readline())
        return status, failed

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


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
        read_end, write_end = os.pipe()
        status = _status(json.loads(line), write_end)
        os.close(write_end)
        with os.fdopen(read_end) as names:
            print(json.dumps((status, names.readline().strip() or None)), file=answers, flush=True)


class _FirstFailure:
    """A plugin that writes the name of the first test that fails."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            os.write(self._descriptor, f"{report.nodeid}\n".encode())


def _status(arguments: list[str], failures: int) -> int:
    child = os.fork()
    if child == 0:
        os.setsid()
        # The plugins are imported already, so that pytest cannot rewrite their assertions.
        options = ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
        os._exit(pytest.main([*arguments, *options], plugins=[_FirstFailure(failures)]))
    until = time.monotonic() + RUN_TIMEOUT_S
    while time.monotonic() < until:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(_POLL_S)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return -signal.SIGKILL


if __name__ == "__main__":
    main()
