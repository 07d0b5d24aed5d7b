"""uvicorn's HTTP/1.1 protocol, opened a little: the application reaches the transport, and heads are bounded.

Adds to `HttpToolsProtocol`: an `Exchange` in `scope["extensions"]` for routes that write their own bytes; bounds on the
size of a request's head and on what is read of a body nobody wants any more; OpenAI's error body for requests that
are not HTTP; TCP_NODELAY. Only uvicorn's public attributes are used, but they are not promised to stay: the version
range in pyproject.toml is narrow, and `tests/gateway/test_protocol.py` holds the behaviour.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gateway.errors import ApiError
from gateway.exchange import EXTENSION, Exchange, head_bytes

MAX_HEAD_BYTES = 64 << 10
MAX_DISCARDED_BYTES = 16 << 20
LINGER_S = 1.0


class HeadTooLargeError(Exception):
    """A request's line and headers exceed `MAX_HEAD_BYTES`."""


class GatewayProtocol(HttpToolsProtocol):
    """One connection. `exchanges` are the requests on it that are not answered yet, oldest first.

    Attributes:
        reading_since: Loop time at which the request being read began (or the connection, before its first), or None.
        paused_since: Loop time since when the client has not read what was sent to it, or None.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Pass everything to uvicorn."""
        super().__init__(*args, **kwargs)
        self.exchanges: list[Exchange] = []
        self.reading_since: float | None = None
        self.paused_since: float | None = None
        self._is_reading_head = False
        self._is_head_too_large = False
        self._head_size = 0
        self._discarded = 0
        self._refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin a connection."""
        connection = transport.get_extra_info("socket")
        if connection is not None and connection.family in (socket.AF_INET, socket.AF_INET6):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        super().connection_made(transport)
        self.reading_since = self.loop.time()

    def connection_lost(self, exc: Exception | None) -> None:
        """End a connection, and with it everything unanswered on it."""
        super().connection_lost(exc)
        exchanges, self.exchanges = self.exchanges, []
        for exchange in exchanges:
            exchange.lose()

    def data_received(self, data: bytes) -> None:
        """Parse bytes; a head that grows without end is refused before the parser holds all of it."""
        if self._refused:
            self._discard(len(data))
            return
        if self._is_reading_head:
            self._head_size += len(data)
        super().data_received(data)
        if self._is_reading_head and self._head_size > MAX_HEAD_BYTES:
            self._is_head_too_large = True
            self.send_400_response("")

    def on_message_begin(self) -> None:
        """Begin a request, and give it its exchange."""
        super().on_message_begin()
        self.reading_since = self.loop.time()
        self._is_reading_head = True
        self._head_size = 0
        self._discarded = 0
        exchange = Exchange(self.transport, self.server_state.default_headers)
        exchange.paused_since = self.paused_since
        self.exchanges.append(exchange)
        self.scope["extensions"] = {EXTENSION: exchange}  # type: ignore[dict-item]

    def on_headers_complete(self) -> None:
        """Start the request, now that its head is known to be of bearable size."""
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > MAX_HEAD_BYTES:
            self._is_head_too_large = True
            raise HeadTooLargeError
        super().on_headers_complete()
        self._is_reading_head = False
        self.exchanges[-1].bind(self.cycle, self.scope["http_version"], self.scope["method"])

    def on_body(self, body: bytes) -> None:
        """Take a piece of a body; close when too much comes of one that has been answered already."""
        if self.cycle.response_complete:
            self._discard(len(body))
            return
        super().on_body(body)

    def _discard(self, size: int) -> None:
        self._discarded += size
        if self._discarded > MAX_DISCARDED_BYTES:
            self.transport.abort()

    def on_message_complete(self) -> None:
        """End the reading of a request."""
        super().on_message_complete()
        self.reading_since = None

    def pause_writing(self) -> None:
        """Tell whoever writes that the client reads too slowly."""
        super().pause_writing()
        self.paused_since = self.loop.time()
        for exchange in self.exchanges:
            exchange.paused_since = self.paused_since

    def resume_writing(self) -> None:
        """Tell whoever writes that the client has caught up."""
        super().resume_writing()
        self.paused_since = None
        for exchange in list(self.exchanges):
            exchange.resume()

    def on_response_complete(self) -> None:
        """Forget the oldest exchange, which has been answered, through itself or through ASGI."""
        self.exchanges.pop(0).closed = True
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that are not HTTP with the error body that our clients can read, and close."""
        if self._refused:
            return
        self._refused = True
        if self._is_head_too_large:
            error = ApiError(431, f"The request's headers exceed {MAX_HEAD_BYTES} bytes.", code="headers_too_large")
        else:
            error = ApiError(400, msg, code="invalid_http")
        body = error.body()
        headers = [
            *self.server_state.default_headers,
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            (b"connection", b"close"),
        ]
        # An answer in the middle of an earlier request's answer would corrupt that one.
        is_answering = self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete
        if is_answering or self.transport.is_closing():
            self.transport.close()
            return
        self.transport.write(head_bytes(error.status, headers) + body)
        # Closing with bytes unread would reset the connection, and the client would lose the answer.
        self.transport.write_eof()
        self.loop.call_later(LINGER_S, self.transport.close)
