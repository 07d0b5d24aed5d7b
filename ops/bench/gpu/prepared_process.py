"""A process for one job: a crash, a hang or a CUDA error that never clears ends with it and harms no other job.

The process imports what it needs while the job before it still runs, and leaves the GPU alone until its job comes.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

from ops.stack.tether import tethered

Json = dict[str, Any]


class JobFailedError(RuntimeError):
    """A process ended before its job did; the message says how."""


class PreparedProcess:
    """Owns a process that runs a module, and the folder in which that leaves its answer."""

    def __init__(self, module: str) -> None:
        """Start importing."""
        self._folder = tempfile.TemporaryDirectory(prefix="headrace-bench-")
        self._answer = Path(self._folder.name) / "answer.json"
        self._process = subprocess.Popen(
            tethered([sys.executable, "-m", module, str(self._answer)]),
            stdin=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
        )

    def run(self, job: Json, limit_s: float) -> Json:
        """Give the process its job, and return what it answers.

        Raises:
            JobFailedError: It ended without an answer, or was killed after `limit_s`.
        """
        try:
            self._process.communicate(json.dumps(job) + "\n", timeout=limit_s)
        except subprocess.TimeoutExpired as error:
            raise JobFailedError(f"killed: it ran longer than {limit_s:.0f} s") from error
        if not self._answer.exists():
            raise JobFailedError(_ending(self._process.returncode))
        answer: Json = json.loads(self._answer.read_text())
        return answer

    def close(self) -> None:
        """End the process if it still runs, and remove its folder."""
        self._process.kill()
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._folder.cleanup()


def prepared_processes(module: str, count: int) -> Generator[PreparedProcess, None, None]:
    """Yield one process after the other; while one is used the next one imports."""
    upcoming = PreparedProcess(module) if count else None
    try:
        for place in range(count):
            assert upcoming is not None
            current, upcoming = upcoming, PreparedProcess(module) if place + 1 < count else None
            try:
                yield current
            finally:
                current.close()
    finally:
        if upcoming is not None:
            upcoming.close()


def serve_one_job(run: Callable[[Json], Json]) -> None:
    """Be such a process: wait for the job on the standard input, run it, leave the answer in the file that is named."""
    line = sys.stdin.readline()
    if line:
        answer = run(json.loads(line))
        path = Path(sys.argv[1])
        path.with_suffix(".part").write_text(json.dumps(answer))
        path.with_suffix(".part").replace(path)


def _ending(code: int) -> str:
    if code < 0:
        return f"its process was ended by {signal.Signals(-code).name}"
    return f"its process ended with exit code {code}"
