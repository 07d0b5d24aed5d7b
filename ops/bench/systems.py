"""The systems that benchmarks drive, and the processes that they start, with the CPU time and memory that these take.

All of a system as `headrace up` runs it, or its parts one by one, on free ports. Each process ends with the benchmark,
whatever ends that, and so does what it starts.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ops.load_generator.connection import Address
from ops.stack.ports import free_port
from ops.stack.servers import find_nats_server
from ops.stack.tether import tethered

HOST = "127.0.0.1"
API_KEY = "sk-bench"
MODEL = "stamping"
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
    # Not at the top: a bare machine has no psutil, and what runs there reads no times.
    import psutil

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
        with suppress(OSError):
            status = Path(f"/proc/{pid}/status").read_text()
            total += next((int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM")), 0)
    return total


def descendants(pids: Collection[int]) -> list[int]:
    """Return these processes and all their children."""
    import psutil

    found = list(pids)
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            found += [child.pid for child in psutil.Process(pid).children(recursive=True)]
    return found


@contextmanager
def headrace_up(
    arguments: Sequence[str], environ: Mapping[str, str], timeout_s: float = START_TIMEOUT_S
) -> Iterator[dict[str, Any]]:
    """Run `headrace up` until the block ends; yield what its ready file says.

    Raises:
        StartError: It does not start.
    """
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        ready = Path(folder) / "ready.json"
        command = [sys.executable, "-m", "ops.cli", "up", "--port", "0", "--state-dir", f"{folder}/state"]
        command += ["--ready-file", str(ready), *arguments]
        with running(command, Path(folder) / "up.log", ready.exists, environ, timeout_s):
            yield json.loads(ready.read_text())


def address_of(ready: Mapping[str, Any], model: str) -> Address:
    """Return where the system of a ready file answers for a model; `SystemExit` if that is not on this machine."""
    url = urlsplit(ready["url"])
    if url.hostname not in (HOST, "localhost", "::1"):
        raise SystemExit(f"{ready['url']} is not on loopback, and this benchmark drives nothing else")
    return Address(url.hostname, url.port or 80, model, ready["api_key"])


@contextmanager
def parts() -> Iterator[Callable[..., tuple[int, str]]]:
    """Yield a function that starts a part of a system, which runs until the block ends.

    It takes a name, a command, a word that the log has when the part is ready, a port that then listens, and settings;
    it returns the pid and the log.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="headrace-bench-")))

        def start(
            name: str, command: Sequence[str], ready_word: str = "", port: int | None = None, **settings: object
        ) -> tuple[int, str]:
            log = folder / f"{name}.log"

            def is_ready() -> bool:
                return ready_word in log.read_text(errors="replace") and (port is None or accepts(port))

            return stack.enter_context(running(command, log, is_ready, own_settings(**settings))), log.read_text()

        yield start


@dataclass(frozen=True, slots=True)
class Target:
    """What to drive. `pids` are its processes by role."""

    name: str
    address: Address
    pids: dict[str, list[int]]


@contextmanager
def isolated_gateway(step_ms: float) -> Iterator[Target]:
    """Run a gateway before NATS and a stamping worker."""
    port = free_port()
    url = f"nats://{HOST}:{port}"
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as storage, parts() as start:
        server = [find_nats_server(), "-a", HOST, "-p", str(port), "-js", "-sd", storage]
        nats, _ = start("nats", server, port=port)
        worker, _ = start("worker", [sys.executable, "-m", "ops.bench.stamping_worker", url, MODEL, str(step_ms)])
        settings = {"NATS_URL": url, "PORT": 0, "API_KEY": API_KEY, "DRAIN_TIMEOUT_S": 1}
        gateway, log = start("gateway", [sys.executable, "-m", "gateway"], " serving ", **settings)
        found = re.search(r" serving .*url=http://[\d.]+:(\d+)", log)
        assert found is not None
        time.sleep(1.0)  # heartbeats arrive
        pids = {"nats": [nats], "worker": [worker], "gateway": [gateway]}
        yield Target("isolated", Address(HOST, int(found[1]), MODEL, API_KEY), pids)
