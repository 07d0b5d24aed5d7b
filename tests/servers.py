"""Real NATS and Redis servers for tests: processes on free ports, their data in a directory of the test."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sysconfig
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from nats.js import JetStreamContext

from ops.stack.ports import free_port
from shared.consumers import consumer_config, queue_stream
from shared.streams import StreamLimits
from shared.subjects import Queue

START_TIMEOUT_S = 30.0


def find_binary(name: str) -> str:
    """Return the path of a server that the environment's packages installed, or the one on the PATH."""
    path = shutil.which(name, path=sysconfig.get_path("scripts")) or shutil.which(name)
    if path is None:
        raise FileNotFoundError(f"{name} is not installed: install headrace[test]")
    return path


def is_alive(pid: int) -> bool:
    """Return whether a process runs; one that has ended and waits to be reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@dataclass
class Server(ABC):
    """A server process that a test may kill, stop and start again on the same port.

    Attributes:
        url: Where clients connect; stays the same over restarts.
    """

    directory: Path
    arguments: tuple[str, ...] = ()
    port: int = 0
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    @abstractmethod
    def url(self) -> str:
        """Where clients connect."""

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def log(self) -> str:
        return (self.directory / "server.log").read_text(errors="replace")

    def start(self) -> None:
        """Start the process and wait until it accepts connections; the first time on a free port.

        Another process may take the port first.
        """
        if self.port:
            self._start()
            return
        for attempt in range(5):
            self.port = free_port()
            try:
                self._start()
                return
            except RuntimeError:
                if attempt == 4:
                    raise

    def _start(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        with (self.directory / "server.log").open("ab") as output:
            self.process = subprocess.Popen(self._command(), stdout=output, stderr=subprocess.STDOUT)
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._is_ready():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise RuntimeError(f"{type(self).__name__} did not start:\n{self.log[-2000:]}")
            time.sleep(0.01)

    def kill(self) -> None:
        """End the process at once, as a crash would."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
        if self.process is not None:
            self.process.wait()

    @contextmanager
    def running(self) -> Iterator[Self]:
        """Run it until the block ends."""
        self.start()
        try:
            yield self
        finally:
            self.kill()

    def pause(self) -> None:
        """Freeze the process: connections stay open and nothing is answered."""
        os.kill(self.pid, signal.SIGSTOP)
        # It may run for a moment more.
        os.waitpid(self.pid, os.WUNTRACED)

    def resume(self) -> None:
        """Let a paused process go on."""
        os.kill(self.pid, signal.SIGCONT)

    def restart(self) -> None:
        """Kill the process and start it again on the same port with the same data."""
        self.kill()
        self.start()

    @abstractmethod
    def _command(self) -> list[str]:
        """The command that starts it."""

    def _is_ready(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=0.2):
                return True
        except OSError:
            return False


@dataclass
class NatsServer(Server):
    """nats-server. `arguments` are added to its command line, e.g. `-c FILE`.

    Attributes:
        has_jetstream: Whether it has JetStream after its next start.
    """

    has_jetstream: bool = True

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    def _command(self) -> list[str]:
        command = [find_binary("nats-server"), "-a", "127.0.0.1", "-p", str(self.port)]
        # Written once it listens: until then another process may answer at the port.
        command += ["--ports_file_dir", str(self.directory)]
        if self.has_jetstream:
            command += ["-js", "-sd", str(self.directory / "jetstream")]
        return [*command, *self.arguments]

    def _is_ready(self) -> bool:
        return bool(list(self.directory.glob(f"*_{self.pid}.ports"))) and super()._is_ready()


@dataclass
class RedisServer(Server):
    """redis-server without persistence."""

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def _command(self) -> list[str]:
        command = [find_binary("redis-server"), "--bind", "127.0.0.1", "--port", str(self.port), "--save", ""]
        return [*command, "--appendonly", "no", "--dir", str(self.directory), *self.arguments]


async def pull_subscription(
    js: JetStreamContext, model: str, queue: Queue, tenant: str = "default"
) -> JetStreamContext.PullSubscription:
    """Bind the client library to a consumer as earlier versions made it, for the library's pulls name no group."""
    config = consumer_config(model, queue, StreamLimits(), tenant)
    await js.add_consumer(queue_stream(queue, tenant), config)
    return await js.pull_subscribe_bind(config.durable_name, queue_stream(queue, tenant))
