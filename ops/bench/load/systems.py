"""The systems that benchmarks drive: all of it as `headrace up` runs it, or its parts one by one, on free ports."""

from __future__ import annotations

import json
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ops.bench.load.processes import HOST, START_TIMEOUT_S, accepts, own_settings, running
from ops.load_generator.connection import Address
from ops.stack.ports import free_port
from ops.stack.servers import find_nats_server

API_KEY = "sk-bench"
MODEL = "stamping"


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
    """Return where the system of a ready file answers for a model.

    Raises:
        SystemExit: That is not on this machine.
    """
    url = urlsplit(ready["url"])
    if url.hostname not in (HOST, "localhost", "::1"):
        raise SystemExit(f"{ready['url']} is not on loopback, and this benchmark drives nothing else")
    return Address(url.hostname, url.port or 80, model, ready["api_key"])


@dataclass(frozen=True, slots=True)
class Parts:
    """Starts the parts of a system, which run until the stack unwinds; logs and files lie in `directory`."""

    stack: ExitStack
    directory: Path

    def start(self, command: Sequence[str], name: str, ready_word: str, **settings: object) -> tuple[int, str]:
        """Run a command until its log has a word; return its pid and its log."""
        log = self.directory / f"{name}.log"

        def is_ready() -> bool:
            return ready_word in log.read_text(errors="replace")

        return self.stack.enter_context(running(command, log, is_ready, own_settings(**settings))), log.read_text()

    def start_listener(self, command: Sequence[str], name: str, port: int) -> int:
        """Run a command, wait until it listens on a port, and return its pid."""
        log = self.directory / f"{name}.log"
        return self.stack.enter_context(running(command, log, lambda: accepts(port), own_settings()))

    def start_nats(self) -> tuple[int, str]:
        """Run a NATS server; return its pid and its address."""
        port = free_port()
        command = [find_nats_server(), "-a", HOST, "-p", str(port), "-js", "-sd", str(self.directory / "jetstream")]
        return self.start_listener(command, "nats", port), f"nats://{HOST}:{port}"

    def start_gateway(self, module: Sequence[str], nats_url: str, **settings: object) -> tuple[int, int]:
        """Run a gateway; return its pid and its port."""
        settings = {"NATS_URL": nats_url, "PORT": 0, "API_KEY": API_KEY, **settings}
        pid, log = self.start([sys.executable, "-m", *module], "gateway", " serving ", **settings)
        found = re.search(r" serving .*url=http://[\d.]+:(\d+)", log)
        assert found is not None
        return pid, int(found[1])


@contextmanager
def parts() -> Iterator[Parts]:
    """Stop what is started, and remove the folder, when the block ends."""
    with ExitStack() as stack:
        yield Parts(stack, Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="headrace-bench-"))))


@dataclass(frozen=True, slots=True)
class Target:
    """What to drive. `pids` are its processes by role."""

    name: str
    address: Address
    pids: dict[str, list[int]]


@contextmanager
def isolated_gateway(step_ms: float) -> Iterator[Target]:
    """Run a gateway before NATS and a stamping worker."""
    with parts() as system:
        nats, nats_url = system.start_nats()
        command = [sys.executable, "-m", "ops.bench.load.stamping_worker", nats_url, MODEL, str(step_ms)]
        worker, _ = system.start(command, "worker", "")
        gateway, port = system.start_gateway(["gateway"], nats_url, DRAIN_TIMEOUT_S=1)
        time.sleep(1.0)  # heartbeats arrive
        pids = {"nats": [nats], "worker": [worker], "gateway": [gateway]}
        yield Target("isolated", Address(HOST, port, MODEL, API_KEY), pids)
