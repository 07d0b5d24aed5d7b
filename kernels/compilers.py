"""Runs compilers side by side as child processes, none of which outlives this process, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from shared.errors import HeadraceError

# Long enough for a machine whose processors are all busy: without the library a worker is many times slower.
BUILD_TIMEOUT_S = 600.0
POLL_INTERVAL_S = 0.2
# A shell that runs a compiler in a session of its own and kills that session when the pipe on its standard input is
# closed. The system closes it when this process ends, whichever signal ended it. The compiler itself does not inherit
# the pipe.
_GUARDED = """
exec 3<&0
{ read -r _ <&3; kill -KILL 0; } </dev/null >/dev/null 2>&1 &
"$@" </dev/null 3<&-
status=$?
kill -KILL $!
exit $status
"""


class KernelBuildError(HeadraceError):
    """The CPU kernels cannot be compiled here."""


def run_compilers(commands: Sequence[Sequence[str]], report: Callable[[int], None]) -> None:
    """Run commands side by side to their ends; when one fails, the others are killed.

    Raises:
        KernelBuildError: One fails, or takes too long.
        OSError: One cannot be started.
    """
    with _guard_pipe() as guard, ExitStack() as running:
        processes: list[subprocess.Popen[str]] = []
        for command in commands:
            process = running.enter_context(_start(command, guard))
            running.callback(_kill, process)
            processes.append(process)
        for process in processes:
            _wait(process, lambda: report(sum(process.poll() is not None for process in processes)))


@contextmanager
def _guard_pipe() -> Iterator[int]:
    """Open a pipe and yield its reading end. Only this process holds the other end, so it closes with this process."""
    reading, writing = os.pipe()
    try:
        yield reading
    finally:
        os.close(reading)
        os.close(writing)


def _start(command: Sequence[str], guard: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        ["/bin/sh", "-c", _GUARDED, "sh", *command],
        stdin=guard,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def _kill(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)


def _wait(process: subprocess.Popen[str], while_waiting: Callable[[], None]) -> None:
    deadline = time.monotonic() + BUILD_TIMEOUT_S
    while True:
        while_waiting()
        try:
            _, messages = process.communicate(timeout=POLL_INTERVAL_S)
            break
        except subprocess.TimeoutExpired:
            if time.monotonic() < deadline:
                continue
            _kill(process)
            process.communicate()
            raise KernelBuildError(f"the compiler did not finish within {BUILD_TIMEOUT_S:g} s") from None
    if process.returncode:
        raise KernelBuildError(f"the compiler failed: {messages.strip()[-2000:]}")
