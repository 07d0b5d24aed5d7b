"""An ASGI application as a handler of exchanges: what serves every route that is not hot, through Starlette.

An answer that comes as one piece is sent whole; another one as it comes, as fast as its client reads. The application
names the owner of the body it is about to read as `request.state.body_owner`.
"""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.types import ASGIApp, Message

from gateway.http1.body import WITHOUT_KEY, BodyOwner
from gateway.http1.exchange import Exchange


class AsgiHandler:
    """Runs an ASGI application for one exchange at a call."""

    def __init__(self, app: ASGIApp, max_body_bytes: int) -> None:
        """Serve `app`; a larger request body is a 413, raised where the application receives it."""
        self._app = app
        self._max_body_bytes = max_body_bytes

    async def __call__(self, exchange: Exchange) -> None:
        """Answer one request."""
        scope = _scope(exchange)
        call = _Call(exchange, self._max_body_bytes, scope["state"])
        await self._app(scope, call.receive, call.send)


class _Call:
    """`receive` and `send` of one call of the application."""

    def __init__(self, exchange: Exchange, max_body_bytes: int, state: dict[str, Any]) -> None:
        self._exchange = exchange
        self._max_body_bytes = max_body_bytes
        self._state = state
        self._has_read = False
        self._status = 0
        self._left = asyncio.Event()
        self._headers: list[tuple[bytes, bytes]] = []

    async def receive(self) -> Message:
        """Return the whole body; after that, wait until the client leaves."""
        if not self._has_read:
            self._has_read = True
            owner: BodyOwner = self._state.get("body_owner", WITHOUT_KEY)
            body = await self._exchange.read_body(self._max_body_bytes, owner)
            return {"type": "http.request", "body": body, "more_body": False}
        if not self._exchange.closed:
            self._exchange.on_disconnect = self._left.set
            await self._left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        """Send the answer, or a piece of it."""
        exchange = self._exchange
        if message["type"] == "http.response.start":
            self._status = message["status"]
            # The exchange frames the body itself.
            self._headers = [(name, value) for name, value in message["headers"] if name != b"content-length"]
            return
        body: bytes = message.get("body", b"")
        if not message.get("more_body", False):
            if exchange.started:
                exchange.finish(body)
            else:
                exchange.respond(self._status, self._headers, body)
            return
        if not exchange.started:
            exchange.start(self._status, self._headers)
        exchange.write(body)
        while exchange.paused_since is not None and not exchange.closed:
            await self._wait_writable()

    async def _wait_writable(self) -> None:
        changed = asyncio.Event()
        self._exchange.on_writable = changed.set
        leaving = asyncio.ensure_future(self._left.wait())
        writable = asyncio.ensure_future(changed.wait())
        await asyncio.wait([leaving, writable], return_when=asyncio.FIRST_COMPLETED)
        leaving.cancel()
        writable.cancel()


def _scope(exchange: Exchange) -> dict[str, Any]:
    head = exchange.head
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": head.http_version,
        "method": head.method,
        "scheme": "http",
        "path": exchange.path,
        "raw_path": head.raw_path,
        "query_string": head.query,
        "root_path": "",
        # A copy, because the head may come again.
        "headers": [*head.headers],
        "client": exchange.client,
        "server": None,
        "state": {},
    }
