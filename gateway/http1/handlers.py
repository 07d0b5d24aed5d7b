"""Runs the handler of each request as a task. An ASGI application is such a handler: this is the server's side of ASGI.

The application finds the exchange in the scope, `scope["extensions"]["headrace.exchange"]`, and may answer through it.
An answer by `send` is sent whole where it comes as one piece, else as it comes and as fast as its client reads. The
scope's `state` has the owner of the body, `body_owner`, and who inflates it, `inflater`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from starlette.types import ASGIApp, Message

from gateway.errors import ApiError
from gateway.http1.body import WITHOUT_KEY, BodyOwner
from gateway.http1.exchange import Exchange

EXTENSION = "headrace.exchange"

Handler = Callable[[Exchange], Awaitable[None]]

_ASGI = {"version": "3.0", "spec_version": "2.3"}
_logger = logging.getLogger(__name__)


class HandlerRunner:
    """The handlers of one server that run now. A handler reports errors to its client itself."""

    def __init__(self, handler: Handler, exempt_paths: frozenset[str] = frozenset()) -> None:
        self._handler = handler
        self._exempt_paths = exempt_paths
        self._loop = asyncio.get_running_loop()
        self._tasks: dict[Exchange, asyncio.Task[None]] = {}

    def run(self, exchange: Exchange, *, is_limited: bool) -> None:
        """Answer an exchange. On a connection that is one too many (`is_limited`), most are refused."""
        if is_limited and exchange.head.path not in self._exempt_paths:
            message = "This gateway holds as many connections as it may. Try again shortly."
            exchange.refuse(ApiError(503, message, code="too_many_connections", retry_after_s=1.0))
            return
        self._tasks[exchange] = self._loop.create_task(self._run(exchange))

    async def cancel_all(self) -> None:
        """End the handlers that still run."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        # One that had not begun has not taken itself out.
        self._tasks.clear()

    async def _run(self, exchange: Exchange) -> None:
        try:
            await self._handler(exchange)
        except Exception:
            _logger.exception("a handler failed")
        finally:
            self._tasks.pop(exchange, None)
            # Cutting the connection is the only way left to say that an answer is incomplete.
            exchange.abandon()


class AsgiHandler:
    """Runs an ASGI application for one exchange at a call."""

    def __init__(self, app: ASGIApp, max_body_bytes: int) -> None:
        """Serve `app`; a larger request body is a 413, raised where the application receives it."""
        self._app = app
        self._max_body_bytes = max_body_bytes

    def __call__(self, exchange: Exchange) -> Awaitable[None]:
        """Serve one request."""
        scope = _scope(exchange)
        call = AsgiCall(exchange, self._max_body_bytes, scope)
        return self._app(scope, call.receive, call.send)


class AsgiCall:
    """`receive` and `send` of one call of an application, on an exchange."""

    __slots__ = ("_exchange", "_has_read", "_headers", "_left", "_length", "_max_body_bytes", "_scope", "_status")

    def __init__(self, exchange: Exchange, max_body_bytes: int, scope: MutableMapping[str, Any]) -> None:
        self._exchange = exchange
        self._max_body_bytes = max_body_bytes
        self._scope = scope
        self._has_read = False
        self._status = 0
        self._left: asyncio.Event | None = None
        self._headers: list[tuple[bytes, bytes]] = []
        self._length: int | None = None

    async def receive(self) -> Message:
        """Return the whole body; after that, wait until the client leaves."""
        if not self._has_read:
            self._has_read = True
            state = self._scope["state"]
            owner: BodyOwner = state.get("body_owner", WITHOUT_KEY)
            body = await self._exchange.read_body(self._max_body_bytes, owner, state.get("inflater"))
            return {"type": "http.request", "body": body, "more_body": False}
        if not self._exchange.closed:
            await self._leaving().wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        """Send the answer, or a piece of it."""
        exchange = self._exchange
        if message["type"] == "http.response.start":
            self._status = message["status"]
            self._length = next((int(value) for name, value in message["headers"] if name == b"content-length"), None)
            # The exchange frames the body itself.
            self._headers = [(name, value) for name, value in message["headers"] if name != b"content-length"]
            return
        body: bytes = message.get("body", b"")
        if not message.get("more_body", False):
            if exchange.started:
                exchange.finish(body)
            else:
                length = self._length if exchange.head.method == "HEAD" else None
                exchange.respond(self._status, self._headers, body, length)
            return
        if not exchange.started:
            exchange.start(self._status, self._headers, self._length)
        exchange.write(body)
        while exchange.paused_since is not None and not exchange.closed:
            await self._wait_writable()

    def _leaving(self) -> asyncio.Event:
        if self._left is None:
            self._left = asyncio.Event()
            self._exchange.on_disconnect = self._left.set
        return self._left

    async def _wait_writable(self) -> None:
        changed = asyncio.Event()
        self._exchange.on_writable = changed.set
        leaving = asyncio.ensure_future(self._leaving().wait())
        writable = asyncio.ensure_future(changed.wait())
        try:
            await asyncio.wait([leaving, writable], return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
            writable.cancel()


def _scope(exchange: Exchange) -> dict[str, Any]:
    head = exchange.head
    return {
        "type": "http",
        "asgi": _ASGI,
        "http_version": head.http_version,
        "method": head.method,
        "scheme": "http",
        "path": head.path,
        "raw_path": head.raw_path,
        "query_string": head.query,
        "root_path": "",
        # A copy, because the head may come again.
        "headers": head.headers.copy(),
        "client": exchange.client,
        "server": None,
        "extensions": {EXTENSION: exchange},
        "state": {},
    }
