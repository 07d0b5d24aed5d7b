"""The worker's health port, for probes of Kubernetes, compose and load balancers.

`/health/live` is 200 while the engine makes progress, `/health/ready` while new requests are taken, both 503 with the
reason otherwise. Alive means that steps end, not that a process answers: a worker whose step counter stands still while
sequences run is restarted. The port is bound before the model is loaded, and answers once it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from collections.abc import Callable
from dataclasses import dataclass, field

from gpu_worker.engine.engine import EngineStats
from shared.errors import ConfigError

SAMPLE_S = 0.5
# Gateways move the requests of a worker that stands still after 10 s; only then is it worth a restart.
STALL_S = 30.0
_READ_TIMEOUT_S = 5.0
_MAX_HEAD_BYTES = 8192
# Of more connections the oldest is cut off, so that those who send nothing deny no probe and use up no descriptors.
MAX_CONNECTIONS = 64


@dataclass(slots=True)
class StallWatch:
    """For how long sequences have been running without the end of a step.

    Attributes:
        stalled_s: That time; a pause of this process counts as one sample, since the engine was paused with it.
    """

    stalled_s: float = 0.0
    _step: int = -1
    _sampled_at: float = field(default=float("-inf"))

    def note(self, stats: EngineStats, now: float) -> None:
        """Record the engine's state; called every `SAMPLE_S`."""
        if stats.running == 0 or stats.step != self._step:
            self.stalled_s = 0.0
        else:
            self.stalled_s += min(now - self._sampled_at, 2 * SAMPLE_S)
        self._step, self._sampled_at = stats.step, now


def bind_health_port(host: str, port: int | None) -> socket.socket | None:
    """Take the port, before the long work of loading begins; `ConfigError` if it cannot be taken."""
    if port is None:
        return None
    with contextlib.ExitStack() as stack:
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            bound = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind((host, port))
        except OSError as error:
            is_of_host = isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL
            variable = "HEADRACE_HEALTH_HOST" if is_of_host else "HEADRACE_HEALTH_PORT"
            raise ConfigError(variable, f"{host}:{port} cannot be used: {error.strerror}") from None
        stack.pop_all()
    return bound


@dataclass(eq=False)
class HealthPort:
    """Answers probes.

    Attributes:
        is_taking_requests: Set by the worker's main: after it has joined, until it drains.
    """

    _stats: Callable[[], EngineStats]
    _is_connected: Callable[[], bool]
    _withdrawn: Callable[[], str | None] = lambda: None
    _watch: StallWatch = field(default_factory=StallWatch)
    _server: asyncio.Server | None = None
    _sampling: asyncio.Task[None] | None = None
    _open: dict[asyncio.StreamWriter, None] = field(default_factory=dict)
    is_taking_requests: bool = False

    async def start(self, bound: socket.socket) -> None:
        """Answer at a port that was taken by `bind_health_port`."""
        self._server = await asyncio.start_server(self._answer, sock=bound)
        self._sampling = asyncio.create_task(self._sample())

    async def close(self) -> None:
        """Answer no more."""
        if self._sampling is not None:
            self._sampling.cancel()
        if self._server is not None:
            self._server.close()

    def problem(self, path: str) -> str | None:
        """Return why the worker is not live, or with `/health/ready` not ready; None when it is."""
        if self._stats().is_fatal:
            return "the engine broke down"
        if self._watch.stalled_s >= STALL_S:
            return f"no step has ended for {self._watch.stalled_s:.0f} s"
        if path != "/health/ready":
            return None
        if not self.is_taking_requests:
            return "starting, or draining"
        if (reason := self._withdrawn()) is not None:
            return f"not computing at present: {reason}"
        return None if self._is_connected() else "not connected to NATS"

    async def _sample(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self._watch.note(self._stats(), loop.time())
            await asyncio.sleep(SAMPLE_S)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._open) >= MAX_CONNECTIONS:
            oldest = next(iter(self._open))
            del self._open[oldest]
            oldest.transport.abort()
        self._open[writer] = None
        with contextlib.suppress(OSError, EOFError, asyncio.LimitOverrunError, TimeoutError):
            async with asyncio.timeout(_READ_TIMEOUT_S):
                head = await reader.readuntil(b"\r\n\r\n")
            # A head without a target is answered like one with a wrong target.
            target = head[:_MAX_HEAD_BYTES].partition(b" ")[2].partition(b" ")[0]
            path = target.partition(b"?")[0].decode("latin-1")
            writer.write(self._response(path))
            await writer.drain()
        self._open.pop(writer, None)
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()

    def _response(self, path: str) -> bytes:
        if path not in ("/health/live", "/health/ready"):
            status, text = "404 Not Found", "there are /health/live and /health/ready"
        else:
            problem = self.problem(path)
            status, text = ("200 OK", "ok") if problem is None else ("503 Service Unavailable", problem)
        body = f"{text}\n".encode()
        head = (
            f"HTTP/1.1 {status}\r\nContent-Type: text/plain\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        return head.encode() + body
