"""uvicorn as this gateway runs it: our protocol, our signals, a drain that ends explicitly, and patience that ends.

uvicorn accepts connections and parses requests. When it shuts down, running streams have a while to finish; then those
that remain are told and cut, before uvicorn would cancel them silently.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Iterator

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.app import HOT_ROUTES
from gateway.completions import Completions
from gateway.config import GatewayConfig
from gateway.errors import ApiError
from gateway.exchange import EXTENSION
from gateway.protocol import GatewayProtocol

SWEEP_INTERVAL_S = 1.0
KEEP_ALIVE_S = 75
# What a sweep waits beyond the time after which the routes should have acted themselves.
MARGIN_S = 5.0
CUT_TIMEOUT_S = 3.0

_logger = logging.getLogger(__name__)


class Entrance:
    """The public port's application: the two hot routes ahead of everything else."""

    def __init__(self, completions: Completions, app: ASGIApp, max_connections: int) -> None:
        """Pass what is not hot on to `app`."""
        chat, completion = HOT_ROUTES
        self._hot = {chat: completions.chat, completion: completions.completion}
        self._app = app
        self._max_connections = max_connections
        self.num_connections: Callable[[], int] = lambda: 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if self.num_connections() > self._max_connections:
            message = f"This gateway holds {self._max_connections} connections already. Try again shortly."
            error = ApiError(503, message, code="too_many_connections", retry_after_s=1.0)
            scope["extensions"][EXTENSION].refuse(error)
            return
        hot = self._hot.get(scope["path"]) if scope["method"] == "POST" else None
        await (hot or self._app)(scope, receive, send)


class HttpServer(uvicorn.Server):
    """A uvicorn server that leaves signals alone and tells the streams it cuts."""

    def __init__(self, app: ASGIApp, config: GatewayConfig, cut: Callable[[], None]) -> None:
        """Serve `app`; `cut` ends what still runs when the drain has lasted long enough."""
        super().__init__(
            uvicorn.Config(
                app,
                http=GatewayProtocol,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=round(config.drain_timeout_s + CUT_TIMEOUT_S),
            )
        )
        self._cut = cut
        self._listening = asyncio.Event()
        self._drain_timeout_s = config.drain_timeout_s
        self._body_timeout_s = config.body_timeout_s
        self._send_timeout_s = config.send_timeout_s

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the process."""
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop accepting, let streams finish, cut those that take too long."""
        overdue = asyncio.get_running_loop().call_later(self._drain_timeout_s, self._cut)
        try:
            await super().shutdown(sockets)
        finally:
            overdue.cancel()

    async def listen(self, public: socket.socket) -> None:
        """Serve connections to a bound socket until `should_exit`."""
        try:
            await self.serve([public])
        finally:
            self._listening.set()

    async def is_listening(self) -> None:
        """Wait until connections are accepted, or never will be."""
        await self._listening.wait()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start accepting connections."""
        await super().startup(sockets)
        self._listening.set()

    async def sweep_forever(self) -> None:
        """Close connections whose client sends its request, or reads its answer, without end."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(SWEEP_INTERVAL_S)
            now = loop.time()
            for connection in list(self.server_state.connections):
                assert isinstance(connection, GatewayProtocol)
                reading, paused = connection.reading_since, connection.paused_since
                is_slow_writer = reading is not None and now - reading > self._body_timeout_s + MARGIN_S
                is_slow_reader = paused is not None and now - paused > self._send_timeout_s + MARGIN_S
                if is_slow_writer or is_slow_reader:
                    connection.transport.abort()
