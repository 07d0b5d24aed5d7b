"""Processes that a fork server starts, with what tests use of `subprocess.Popen`."""

from __future__ import annotations

import atexit
import itertools
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import msgspec

from tests.fork_server import Start


@dataclass(frozen=True)
class Forked:
    """A process; `ending` is where its exit status stands once it has ended."""

    pid: int
    ending: Path

    def poll(self) -> int | None:
        return int(self.ending.read_text()) if self.ending.exists() else None

    def wait(self, timeout: float = 60.0) -> int:
        deadline = time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            time.sleep(0.005)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """Starts processes that are `run()` of a module, which is imported once."""

    def __init__(self, module: str) -> None:
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.fork_server", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=Path(__file__).parents[1],
        )
        atexit.register(self._server.communicate)
        self._lock = threading.Lock()
        self._endings = tempfile.TemporaryDirectory(prefix="forked-")
        self._numbers = itertools.count()

    def start(
        self, arguments: Sequence[str], environ: Mapping[str, str], cwd: Path, streams: tuple[Path, Path, Path]
    ) -> Forked:
        """Start one; its output is appended to files that exist."""
        first, second, third = map(str, streams)
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        with self._lock:
            ending = Path(self._endings.name) / str(next(self._numbers))
            asked = Start(list(arguments), dict(environ), str(cwd), (first, second, third), str(ending))
            self._server.stdin.write(msgspec.json.encode(asked) + b"\n")
            self._server.stdin.flush()
            return Forked(int(self._server.stdout.readline()), ending)


@cache
def fork_server(module: str) -> ForkServer:
    """The server of a module, for all of this session."""
    return ForkServer(module)
