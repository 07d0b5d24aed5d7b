"""One HTTP request and its answer. Every handler gets the head, the body to read, and a way to write bytes.

An exchange owns the response side: head, body framing (chunked on HTTP/1.1, so that the connection can serve the next
request), completion, and callbacks for a client that is gone or reads too slowly. Nothing waits in here: `write` hands
bytes to the transport at once, and the writer checks `paused_since` first.
"""

from __future__ import annotations

import asyncio
import http
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

from gateway.errors import ApiError
from gateway.http1.body import WITHOUT_KEY, BodyOwner, Inflater, RequestBody, check_body_headers
from gateway.http1.head import RequestHead, id_header

Headers = Sequence[tuple[bytes, bytes]]


class ResponseChannel(Protocol):
    """The part of a connection that an exchange uses."""

    transport: asyncio.Transport
    client: tuple[str, int] | None

    @property
    def default_headers(self) -> Headers:
        """Headers of every answer (date)."""
        ...

    @property
    def must_close(self) -> bool:
        """Whether the answer that begins now is the connection's last."""
        ...

    def answered(self, *, close: bool) -> None:
        """Learn that the answer is complete."""


_STATUS_LINES: Mapping[int, bytes] = MappingProxyType(
    {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in http.HTTPStatus}
)


def head_bytes(status: int, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Return status line, headers and the empty line; `ValueError` for a header that would break out of its line."""
    lines = [*map(b": ".join, headers), b"\r\n"]
    fields = b"\r\n".join(lines)
    # A line break behind each line and at the end: counting all at once is cheaper than looking into each value.
    if fields.count(b"\r") + fields.count(b"\n") != 2 * len(lines):
        broken = next(line for line in lines if b"\r" in line or b"\n" in line)
        raise ValueError(f"header {broken.partition(b':')[0]!r} must not contain line breaks")
    return (_STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status) + fields


class _WritePath:
    """Fields that each write reads, close in memory like `_Progress` of a flight."""

    __slots__ = ("_chunked", "_response_head", "_transport", "closed", "paused_since", "started")

    _chunked: bool
    _response_head: bytes
    _transport: asyncio.WriteTransport
    closed: bool
    paused_since: float | None
    started: bool


class Exchange(_WritePath):
    """One request and its answer.

    Attributes:
        head: The request's head.
        status: Of the answer; 0 before it has begun.
        more_headers: Headers of the answer besides its own.
        body: The request's body; see `read_body`.
        paused_since: Loop time since when the transport holds more unsent bytes than it wants, or None: while it is
            set, keep further ones back.
        closed: Nothing can be written any more: the client left, or the response is complete.
        on_disconnect: Called once when the client leaves before the response is complete.
        on_writable: Called when a paused transport takes bytes again.
    """

    __slots__ = (
        "_channel",
        "_closes",
        "body",
        "disconnected",
        "head",
        "more_headers",
        "on_disconnect",
        "on_writable",
        "status",
    )

    def __init__(self, channel: ResponseChannel, head: RequestHead, body: RequestBody) -> None:
        self._channel = channel
        self._transport = channel.transport
        self.head = head
        self.status = 0
        self.more_headers: Headers = ()
        self.body = body
        self._chunked = head.http_version == "1.1"
        self._closes = False
        self._response_head = b""
        self.started = False
        self.paused_since = None
        self.closed = False
        self.disconnected = False
        self.on_disconnect: Callable[[], None] | None = None
        self.on_writable: Callable[[], None] | None = None

    async def read_body(
        self, max_bytes: int, owner: BodyOwner = WITHOUT_KEY, inflater: Inflater | None = None
    ) -> bytes:
        """Return the whole body, which counts against `owner`; it is compressed only with an `inflater`.

        Raises as `RequestBody.read` and `LargeBodies.read`, and `ApiError` 415 for a compression other than gzip.
        """
        is_compressed = check_body_headers(self.head.headers, max_bytes)
        if not is_compressed:
            return await self.body.read(max_bytes, owner)
        if inflater is None:
            raise ApiError(415, "This body must not be compressed.", code="unsupported_content_encoding")
        return await inflater.inflated(owner.tenant, await self.body.read(max_bytes, owner), max_bytes)

    def stream_body(self, max_bytes: int, owner: BodyOwner) -> AsyncIterator[bytes]:
        """Return the body in pieces (`RequestBody.pieces`); `ApiError` 413 if it is too large, 415 if compressed."""
        if check_body_headers(self.head.headers, max_bytes):
            raise ApiError(415, "This body must not be compressed.", code="unsupported_content_encoding")
        return self.body.pieces(max_bytes, owner)

    @property
    def client(self) -> tuple[str, int] | None:
        """Address and port of the client; None on a Unix socket."""
        return self._channel.client

    def respond(self, status: int, headers: Headers, body: bytes, length: int | None = None) -> None:
        """Send a whole response in one write; for HEAD, `length` is the length of GET's body."""
        if self.closed or not self._begin(status):
            return
        # A 204 has no body, and must not say how long it is.
        num_bytes = len(body) if length is None else length
        framing = [] if status == 204 else [(b"content-length", b"%d" % num_bytes)]
        head = head_bytes(status, [*self._headers(headers), *framing, *self._connection_header()])
        self._transport.write(head if self.head.method == "HEAD" else head + body)
        self._complete()

    def close_behind(self) -> None:
        """Make the answer, which has not begun, the last of its connection."""
        self._closes = True

    def refuse(self, error: ApiError) -> None:
        """Answer with an error and close the connection."""
        self._closes = True
        self.respond(error.status, [*error.response_headers(), id_header(self.head.headers)], error.body())

    def start(self, status: int, headers: Headers, length: int | None = None) -> None:
        """Begin a response of `length` bytes, None if unknown; the head leaves with the first bytes written."""
        if self.closed or not self._begin(status):
            return
        assert self.head.method != "HEAD", "an answer to HEAD has no body to stream"
        self._chunked = self._chunked and length is None
        framing = [(b"transfer-encoding", b"chunked")] if self._chunked else []
        framing += [] if length is None else [(b"content-length", b"%d" % length)]
        all_headers = [*self._headers(headers), *framing, *self._connection_header()]
        self._response_head = head_bytes(status, all_headers)

    def write(self, body: bytes) -> None:
        """Send a piece of the body now. Empty pieces are dropped: an empty chunk would end the response."""
        if self.closed or not body:
            return
        if self._chunked:
            body = b"%x\r\n%b\r\n" % (len(body), body)
        if self._response_head:
            body = self._response_head + body
            self._response_head = b""
        try:
            self._transport.write(body)
        except RuntimeError:
            # The transport has just closed, and `connection_lost` was not called yet.
            self.lose()

    def finish(self, body: bytes = b"") -> None:
        """Send the last piece and end the response; the connection serves its next request, if it may."""
        if self.closed:
            return
        if not self._transport.is_closing():
            parts = [self._response_head]
            if self._chunked:
                parts += [b"%x\r\n%b\r\n" % (len(body), body)] if body else []
                parts.append(b"0\r\n\r\n")
            else:
                parts.append(body)
            self._response_head = b""
            self._transport.write(b"".join(parts))
        self._complete()

    def finish_and_close(self, body: bytes) -> None:
        """Send the last piece, end the response, and close the connection once the client has read that much."""
        self._closes = True
        self.finish(body)

    def abandon(self) -> None:
        """Cut the connection, unless the answer is complete."""
        if not self.closed:
            self._transport.abort()

    def lose(self) -> None:
        """Take note that the connection is gone."""
        if self.closed:
            return
        self.closed = self.disconnected = True
        if self.on_disconnect is not None:
            self.on_disconnect()

    def pause(self, now: float) -> None:
        """Take note that the transport holds enough unsent bytes. `now` is loop time."""
        self.paused_since = now

    def resume(self) -> None:
        """Take note that the transport takes bytes again."""
        self.paused_since = None
        if self.on_writable is not None:
            self.on_writable()

    def _begin(self, status: int) -> bool:
        assert not self.started, "a response was already started"
        self.started = True
        self.status = status
        self._closes = self._closes or self._channel.must_close
        return not self._transport.is_closing()

    def _headers(self, own: Headers) -> Headers:
        return (*self._channel.default_headers, *self.more_headers, *own)

    def _connection_header(self) -> list[tuple[bytes, bytes]]:
        return [(b"connection", b"close")] if self._closes else []

    def _complete(self) -> None:
        self.closed = True
        self.on_disconnect = self.on_writable = None
        self._channel.answered(close=self._closes)
