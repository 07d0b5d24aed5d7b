"""NATS, one gateway and a stamping worker on free ports, for measuring the gateway alone."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

API_KEY = "sk-bench"
MODEL = "stamping"
START_TIMEOUT_S = 20.0


@contextlib.contextmanager
def isolated_stack(step_ms: float) -> Iterator[tuple[int, dict[str, list[int]]]]:
    """Run the stack until the block ends; yield the gateway's port and the pids by role."""
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        nats_port = free_port()
        nats_url = f"nats://127.0.0.1:{nats_port}"
        binary = shutil.which("nats-server", path=sysconfig.get_path("scripts")) or "nats-server"
        nats = [binary, "-a", "127.0.0.1", "-p", str(nats_port), "-js", "-sd", str(directory / "jetstream")]
        pids = {"nats": [start_process(stack, nats, directory / "nats.log")]}
        wait_for(lambda: accepts(nats_port), directory / "nats.log")
        worker = [sys.executable, "-m", "ops.bench.stamping_worker", nats_url, MODEL, str(step_ms)]
        pids["worker"] = [start_process(stack, worker, directory / "worker.log")]
        log = directory / "gateway.log"
        environ = {"NATS_URL": nats_url, "PORT": "0", "API_KEY": API_KEY, "DRAIN_TIMEOUT_S": "1"}
        pids["gateway"] = [start_process(stack, [sys.executable, "-m", "gateway"], log, environ)]
        wait_for(lambda: " serving " in log.read_text(), log)
        found = re.search(r" serving .*url=http://[\d.]+:(\d+)", log.read_text())
        assert found is not None
        time.sleep(1.0)  # heartbeats arrive
        yield int(found[1]), pids


def start_process(
    stack: contextlib.ExitStack, command: list[str], log: Path, settings: dict[str, str] | None = None
) -> int:
    """Run a command until the stack unwinds, with `HEADRACE_` settings and its output in a log; return its pid."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
    environ |= {f"HEADRACE_{name}": value for name, value in (settings or {}).items()}
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environ)
    stack.callback(process.wait)
    stack.callback(process.kill)
    return process.pid


def wait_for(is_ready: Callable[[], bool], log: Path) -> None:
    """Wait until something is ready.

    Raises:
        RuntimeError: It took too long; the message has the log.
    """
    deadline = time.monotonic() + START_TIMEOUT_S
    while not is_ready():
        if time.monotonic() > deadline:
            raise RuntimeError(f"not ready after {START_TIMEOUT_S:g} s:\n{log.read_text()}")
        time.sleep(0.02)


def accepts(port: int) -> bool:
    """Say whether somebody listens on a port of loopback."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=0.2):
            return True
    except OSError:
        return False


def free_port() -> int:
    """Return a port of loopback that nobody uses."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
