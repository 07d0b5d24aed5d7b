"""Processes that a benchmark starts and ends: each in a group of its own, so that nothing it starts outlives it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

HOST = "127.0.0.1"
START_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 30.0


class StartError(RuntimeError):
    """A process ended, or was not ready in time; the message has its last lines."""


@contextmanager
def running(
    command: Sequence[str],
    log: Path,
    is_ready: Callable[[], bool],
    environ: Mapping[str, str],
    timeout_s: float = START_TIMEOUT_S,
) -> Iterator[int]:
    """Run a command until the block ends, which begins when it is ready; yield its pid.

    Raises:
        StartError: It ended before it was ready, or is not ready after `timeout_s`.
    """
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=dict(environ), start_new_session=True
        )
    try:
        deadline = time.monotonic() + timeout_s
        while not is_ready():
            if process.poll() is not None or time.monotonic() > deadline:
                words = log.read_text(errors="replace").strip()[-2000:] or "no message"
                raise StartError(f"{Path(command[0]).name} did not start: {words}")
            time.sleep(0.02)
        yield process.pid
    finally:
        _stop(process)


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    with suppress(subprocess.TimeoutExpired):
        process.wait(_STOP_TIMEOUT_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def own_settings(**settings: object) -> dict[str, str]:
    """Return this process's variables with these `HEADRACE_` settings and no others."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
    return inherited | {f"HEADRACE_{name}": str(value) for name, value in settings.items()}


def accepts(port: int) -> bool:
    """Say whether somebody listens on a port of loopback."""
    try:
        with socket.create_connection((HOST, port), timeout=0.2):
            return True
    except OSError:
        return False


def free_port() -> int:
    """Return a port of loopback that nobody uses."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])
