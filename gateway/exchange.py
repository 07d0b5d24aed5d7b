"""One HTTP request's answer, written straight to the transport: what a hot route uses in place of ASGI's `send`.

An exchange owns the response side of one request: head, body framing (chunked on HTTP/1.1, so that the connection can
serve the next request), completion, and the news that the client is gone or reads too slowly. Nothing waits in here:
`write` hands bytes to the transport at once, and whoever writes asks `paused_since` first.
"""

from __future__ import annotations

import asyncio
import http
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from gateway.errors import ApiError

EXTENSION = "headrace.exchange"

Headers = Sequence[tuple[bytes, bytes]]


class ResponseCycle(Protocol):
    """The part of uvicorn's request/response cycle that must know what was written around it."""

    more_body: bool
    response_started: bool
    response_complete: bool
    keep_alive: bool
    message_event: asyncio.Event
    on_response: Callable[..., None]


def status_line(status: int) -> bytes:
    """Return the first line of a response."""
    try:
        phrase = http.HTTPStatus(status).phrase
    except ValueError:
        phrase = ""
    return f"HTTP/1.1 {status} {phrase}\r\n".encode()


def head_bytes(status: int, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Return status line and headers, up to and with the empty line.

    Raises:
        ValueError: A header would break out of its line.
    """
    lines = [status_line(status)]
    for name, value in headers:
        if b"\n" in value or b"\r" in value:
            raise ValueError(f"header {name!r} must not contain line breaks")
        lines.append(b"%b: %b\r\n" % (name, value))
    lines.append(b"\r\n")
    return b"".join(lines)


class Exchange:
    """The response side of one request.

    Attributes:
        paused_since: Loop time since when the transport holds more unsent bytes than it wants, or None: while it is
            set, keep further ones back.
        closed: Nothing can be written any more: the client left, or the response is complete.
        on_disconnect: Called once when the client leaves before the response is complete.
        on_writable: Called when a paused transport takes bytes again.
    """

    __slots__ = (
        "_chunked",
        "_cycle",
        "_default_headers",
        "_head",
        "_is_head",
        "_transport",
        "closed",
        "disconnected",
        "on_disconnect",
        "on_writable",
        "paused_since",
        "started",
    )

    def __init__(self, transport: asyncio.Transport, default_headers: Headers) -> None:
        """Answer on `transport`; `default_headers` (date, server) go into every head."""
        self._transport = transport
        self._default_headers = default_headers
        self._cycle: ResponseCycle | None = None
        self._chunked = False
        self._is_head = False
        self._head = b""
        self.started = False
        self.paused_since: float | None = None
        self.closed = False
        self.disconnected = False
        self.on_disconnect: Callable[[], None] | None = None
        self.on_writable: Callable[[], None] | None = None

    def bind(self, cycle: ResponseCycle, http_version: str, method: str) -> None:
        """Learn, once the request's head has been parsed, how this request wants to be answered."""
        self._cycle = cycle
        self._chunked = http_version == "1.1"
        self._is_head = method == "HEAD"

    @property
    def has_whole_body(self) -> bool:
        """Whether the request's body has arrived completely, so that reading it does not wait."""
        return self._cycle is not None and not self._cycle.more_body

    def respond(self, status: int, headers: Headers, body: bytes) -> None:
        """Send a whole response in one write."""
        if self.closed or not self._begin():
            return
        length = (b"content-length", b"%d" % len(body))
        head = head_bytes(status, [*self._default_headers, *headers, length, *self._connection_header()])
        self._transport.write(head if self._is_head else head + body)
        self._complete()

    def refuse(self, error: ApiError) -> None:
        """Answer with an error and close the connection."""
        assert self._cycle is not None, "the request's head has not been parsed"
        self._cycle.keep_alive = False
        self.respond(error.status, error.response_headers(), error.body())

    def start(self, status: int, headers: Headers) -> None:
        """Begin a response of unknown length; the head leaves together with the first bytes written."""
        if self.closed or not self._begin():
            return
        framing = [(b"transfer-encoding", b"chunked")] if self._chunked else []
        self._head = head_bytes(status, [*self._default_headers, *headers, *framing, *self._connection_header()])

    def write(self, body: bytes) -> None:
        """Send a piece of the body now. Empty pieces are dropped: an empty chunk would end the response."""
        if self.closed or not body:
            return
        if self._chunked:
            body = b"%x\r\n%b\r\n" % (len(body), body)
        if self._head:
            body = self._head + body
            self._head = b""
        try:
            self._transport.write(body)
        except RuntimeError:
            # The transport has just closed, and its protocol has not been told yet.
            self.lose()

    def finish(self, body: bytes = b"") -> None:
        """Send the last piece and end the response; the connection serves its next request, if it may."""
        if self.closed:
            return
        if not self._transport.is_closing():
            parts = [self._head]
            if self._chunked:
                parts += [b"%x\r\n%b\r\n" % (len(body), body)] if body else []
                parts.append(b"0\r\n\r\n")
            else:
                parts.append(body)
            self._head = b""
            self._transport.write(b"".join(parts))
        self._complete()

    def finish_and_close(self, body: bytes) -> None:
        """Send the last piece, end the response, and close the connection once the client has read that much."""
        if not self.closed and self._cycle is not None:
            self._cycle.keep_alive = False
        self.finish(body)

    def lose(self) -> None:
        """Take note that the connection is gone."""
        if self.closed:
            return
        self.closed = self.disconnected = True
        if self.on_disconnect is not None:
            self.on_disconnect()

    def resume(self) -> None:
        """Take note that the transport takes bytes again."""
        self.paused_since = None
        if self.on_writable is not None:
            self.on_writable()

    def _begin(self) -> bool:
        assert self._cycle is not None, "the request's head has not been parsed"
        assert not self.started, "a response was already started"
        self.started = self._cycle.response_started = True
        return not self._transport.is_closing()

    def _connection_header(self) -> list[tuple[bytes, bytes]]:
        assert self._cycle is not None
        return [] if self._cycle.keep_alive else [(b"connection", b"close")]

    def _complete(self) -> None:
        cycle = self._cycle
        assert cycle is not None
        self.closed = True
        self.on_disconnect = self.on_writable = None
        cycle.response_complete = True
        cycle.message_event.set()
        if not cycle.keep_alive:
            self._transport.close()
        cycle.on_response()
