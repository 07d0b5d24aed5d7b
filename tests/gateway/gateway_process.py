"""A gateway as its own process, `python -m gateway`, known only through its log and its ports.

Unless a test is about deaths, its gateway is more patient with its workers than people would like.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.forked import Forked, fork_server

API_KEY = "sk-test"
START_TIMEOUT_S = 60.0
AS_SHIPPED = ("-m", "gateway")


@dataclass
class GatewayProcess:
    """A running gateway."""

    process: subprocess.Popen[bytes] | Forked
    log_file: Path

    @property
    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    @property
    def port(self) -> int:
        found = re.search(r" serving .*url=http://[\d.]+:(\d+)", self.log)
        assert found is not None, self.log
        return int(found[1])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def stop(self, timeout_s: float = 30.0) -> int:
        """Stop it as a supervisor would, and return its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise


@contextmanager
def running_gateway(
    directory: Path, nats_url: str, *, is_patient: bool = True, **settings: object
) -> Iterator[GatewayProcess]:
    """Run a gateway on a free port with these settings until the block ends, which begins once it serves."""
    command = None if is_patient else AS_SHIPPED
    with starting_gateway(directory, nats_url, command, **settings) as gateway:
        deadline = time.monotonic() + START_TIMEOUT_S
        while " serving " not in gateway.log:
            assert gateway.process.poll() is None, gateway.log
            assert time.monotonic() < deadline, gateway.log
            time.sleep(0.01)
        yield gateway


@contextmanager
def starting_gateway(
    directory: Path, nats_url: str, command: tuple[str, ...] | None = AS_SHIPPED, **settings: object
) -> Iterator[GatewayProcess]:
    """Run a gateway on a free port with these settings until the block ends, which begins at once.

    Python runs the `command`; without one, it is a patient gateway.
    """
    directory.mkdir(parents=True, exist_ok=True)
    values = {"nats_url": nats_url, "port": 0, "api_key": API_KEY, "drain_timeout_s": 2} | settings
    environ = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
    environ |= {f"HEADRACE_{name.upper()}": str(value) for name, value in values.items()}
    log_file = directory / "gateway.log"
    log_file.write_bytes(b"")
    process: subprocess.Popen[bytes] | Forked
    if command is None:
        server = fork_server("tests.gateway.patient_gateway")
        process = server.start((), environ, Path.cwd(), (Path(os.devnull), log_file, log_file))
    else:
        with log_file.open("wb") as output:
            process = subprocess.Popen([sys.executable, *command], env=environ, stderr=output, stdout=output)
    gateway = GatewayProcess(process, log_file)
    try:
        yield gateway
    finally:
        gateway.stop()
