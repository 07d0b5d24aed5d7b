"""Processes that a benchmark starts: each ends with the benchmark, whatever ends that, and so does what it starts.

And the CPU time and memory that processes take.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from ops.stack.tether import tethered

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

    SIGTERM ends the block as an exception does, so that the command stops in order and folders are removed. Where the
    benchmark is killed, the command is killed with it.

    Raises:
        StartError: It ended before it was ready, or is not ready after `timeout_s`.
    """
    with log.open("wb") as output:
        process = subprocess.Popen(
            tethered(command), stdout=output, stderr=subprocess.STDOUT, env=dict(environ), start_new_session=True
        )
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
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
        signal.signal(signal.SIGTERM, before)


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
    """Return whether a port of loopback accepts connections."""
    try:
        with socket.create_connection((HOST, port), timeout=0.2):
            return True
    except OSError:
        return False


def cpu_seconds(pids: Iterable[int]) -> float:
    """Return user and system time spent so far by these processes; those that are gone count nothing."""
    total = 0.0
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            times = psutil.Process(pid).cpu_times()
            total += times.user + times.system
    return total


def peak_rss_bytes(pids: Iterable[int]) -> int:
    """Return the sum of the processes' largest resident sizes so far."""
    total = 0
    for pid in pids:
        try:
            status = Path(f"/proc/{pid}/status").read_text()
        except OSError:
            continue
        total += next((int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM")), 0)
    return total


def descendants(pids: Collection[int]) -> list[int]:
    """Return these processes and all their children."""
    found = list(pids)
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            found += [child.pid for child in psutil.Process(pid).children(recursive=True)]
    return found
