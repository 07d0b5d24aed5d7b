"""One client connection: bytes in, one request at a time to its handler, and a deadline in every state.

A request is parsed only when the one before it has been answered and the client has read enough of the answers. So
pipelined requests wait as bytes, in an input that is bounded: what does not fit stays in the kernel, because reading
pauses. Nothing behind a request can disturb its answer.

States: *waiting* for a head (no `_exchange`), *body* (with a `_framing`), *answering* (an `_exchange`, no `_framing`),
and *lingering* (`_is_lingering`): the last answer is sent, and what still comes is dropped until the client closes.
"""

from __future__ import annotations

import asyncio
import fcntl
import socket
import sys
import termios
from typing import cast

from gateway.errors import ApiError
from gateway.http1.body import ClientGoneError, RequestBody
from gateway.http1.body_framing import BodyFraming, ChunkedFraming, LengthFraming
from gateway.http1.connection_table import ConnectionTable
from gateway.http1.exchange import Exchange, Headers, head_bytes
from gateway.http1.handlers import HandlerRunner
from gateway.http1.head import RequestHead, RequestInput, id_header

# The rest of an unread body that is dropped to keep the connection; a longer one closes it.
MAX_DROPPED_BODY_BYTES = 64 << 10
MAX_LINGER_BYTES = 40 << 20
# Time in which a connection may still send a request when the drain begins: one may be on its way, and a client that
# gets its answer learns from it that it is the last, while one whose connection is closed meanwhile loses its request.
DRAIN_GRACE_S = 1.0

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class Connection(asyncio.BufferedProtocol):
    """One connection.

    Attributes:
        paused_since: Loop time since when the client has not read its answer, or None.
        is_limited: Whether it is one too many: it gets one answer, and no other than health.
    """

    transport: asyncio.Transport

    def __init__(self, table: ConnectionTable[Connection], runner: HandlerRunner, receive_buffer: memoryview) -> None:
        self._table = table
        self._limits = table.limits
        self._runner = runner
        self._receive_buffer = receive_buffer
        self._loop = asyncio.get_running_loop()
        self._input = RequestInput()
        self._exchange: Exchange | None = None
        self._framing: BodyFraming | None = None
        self._deadline: float | None = None
        self._is_head_timed = True
        self._is_broken = False
        self._is_lingering = False
        self._is_reading_paused = False
        self._num_dropped = 0
        self.paused_since: float | None = None
        self.address = ""
        self.client: tuple[str, int] | None = None
        self.is_limited = False

    @property
    def is_busy(self) -> bool:
        """Whether an answer is due or not written out, or a request may still come."""
        if self._exchange is not None or self.transport.get_write_buffer_size() > 0:
            return True
        return not self._is_lingering and not self.transport.is_closing()

    # What asyncio calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to wait for the first request."""
        self.transport = cast("asyncio.Transport", transport)
        accepted = transport.get_extra_info("socket")
        if accepted is not None and accepted.family in (socket.AF_INET, socket.AF_INET6):
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peer = transport.get_extra_info("peername")
        # Asked of the kernel once, not for every request.
        self.client = (peer[0], peer[1]) if isinstance(peer, tuple) else None
        self.address = peer[0] if peer else ""
        self._set_deadline(DRAIN_GRACE_S if self._table.is_draining else self._limits.head_timeout_s)
        self.is_limited = self._table.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """End, and with it the request that is unanswered."""
        self._table.remove(self)
        exchange, self._exchange = self._exchange, None
        self._framing = self._deadline = None
        self._input.clear()
        if exchange is not None:
            exchange.body.fail(ClientGoneError())
            exchange.lose()

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return where to receive: never more than the input has room for."""
        return self._receive_buffer[: self._input.room]

    def buffer_updated(self, nbytes: int) -> None:
        """Take bytes that were received."""
        if self._is_lingering:
            self._num_dropped += nbytes
            if self._num_dropped > MAX_LINGER_BYTES:
                self.transport.abort()
            return
        self._input.data += self._receive_buffer[:nbytes]
        self._advance()

    def eof_received(self) -> None:
        """Treat the client's EOF as a disconnect: the transport closes once its buffer is sent."""
        self._set_deadline(self._limits.send_timeout_s)

    def pause_writing(self) -> None:
        """Tell the exchange that the client reads too slowly."""
        self.paused_since = self._loop.time()
        if self._exchange is not None:
            self._exchange.pause(self.paused_since)

    def resume_writing(self) -> None:
        """Tell the exchange that the client has caught up; serve requests that waited for that."""
        self.paused_since = None
        if self._exchange is not None:
            self._exchange.resume()
        self._advance()

    # Called by the exchange.

    @property
    def default_headers(self) -> Headers:
        """Headers of every answer."""
        return self._table.default_headers

    @property
    def must_close(self) -> bool:
        """Whether the answer that begins now is the last."""
        exchange, framing = self._exchange, self._framing
        if exchange is None or not exchange.head.keep_alive or self._table.is_draining:
            return True
        if framing is None or self.is_limited or self._is_broken:
            return self.is_limited or self._is_broken
        if framing.remaining is None or framing.remaining > MAX_DROPPED_BODY_BYTES:
            return True
        # A client that got no `100 Continue` may or may not send its body.
        return exchange.head.expects_continue

    def answered(self, *, close: bool) -> None:
        """Go on after an answer: with the rest of its request, the next one, or the end."""
        if close or self._is_broken:
            self._linger()
        elif self._framing is None:
            self._wait()
            self._advance()
        elif self._exchange is not None:
            self._exchange.body.drop()
            # No request is served here while the rest of the body comes, which may be never.
            self._table.note_waiting(self)
            self._advance()

    # Called by the table.

    def has_unread_bytes(self) -> bool:
        """Whether the kernel holds bytes of the client that this process has not had the time to read."""
        descriptor = self.transport.get_extra_info("socket").fileno()
        if self._is_reading_paused or descriptor < 0:
            return False
        count = fcntl.ioctl(descriptor, termios.FIONREAD, bytes(4))
        return bool(int.from_bytes(count, sys.byteorder))

    def evict(self) -> None:
        """Close at once."""
        if self.transport.get_write_buffer_size():
            # A client that does not read would keep a closing connection.
            self.transport.abort()
        else:
            self.transport.close()

    def drain(self) -> None:
        """Close soon, or after the answer to a request that comes before."""
        if not self._is_lingering:
            self._set_deadline(min(self._limits.head_timeout_s, DRAIN_GRACE_S))

    def postpone(self, seconds: float) -> None:
        """Move the deadlines: this process stood still."""
        if self._deadline is not None:
            self._deadline += seconds
        if self.paused_since is not None:
            self.paused_since += seconds
            if self._exchange is not None:
                self._exchange.pause(self.paused_since)

    def expire(self, now: float) -> None:
        """Act, if the client's time is up. `now` is loop time."""
        if self.paused_since is not None and now - self.paused_since > self._limits.send_timeout_s:
            self.transport.abort()
        elif self._deadline is None or now < self._deadline:
            return
        elif self._is_lingering or self.transport.is_closing():
            self.transport.abort()
        elif self._exchange is not None:
            earned_s = self._exchange.body.earned_s
            if now >= self._deadline + earned_s:
                self._break(_too_slow("body", round(self._limits.body_timeout_s + earned_s, 1)))
        elif self._input.has_begun_head:
            self._refuse(_too_slow("head", self._limits.head_timeout_s))
        else:
            self.evict()

    # The states.

    def _advance(self) -> None:
        while self._input.data and not self._is_lingering:
            exchange = self._exchange
            if exchange is None:
                if self.paused_since is not None or not self._begin():
                    break
            elif self._framing is None or not exchange.body.is_wanted or not self._take_body(exchange, self._framing):
                break
        self._read_while(self._input.room > 0)

    def _read_while(self, has_room: bool) -> None:
        if has_room is self._is_reading_paused and not self.transport.is_closing():
            self._is_reading_paused = not has_room
            if has_room:
                self.transport.resume_reading()
            else:
                self.transport.pause_reading()

    def _begin(self) -> bool:
        try:
            head = self._input.take_head()
        except ApiError as error:
            self._refuse(error)
            return False
        if head is not None:
            self._start(head)
        elif not self._is_head_timed:
            self._is_head_timed = True
            self._set_deadline(self._limits.head_timeout_s)
        return head is not None

    def _start(self, head: RequestHead) -> None:
        self._table.note_busy(self)
        body = RequestBody(self._want_body, self._table.body_budget)
        self._exchange = Exchange(self, head, body)
        if head.content_length == 0:
            self._deadline = None
            body.complete()
        else:
            length = head.content_length
            self._framing = ChunkedFraming() if length is None else LengthFraming(length)
            self._set_deadline(self._limits.body_timeout_s)
        self._runner.run(self._exchange, is_limited=self.is_limited)

    def _want_body(self) -> None:
        exchange, framing = self._exchange, self._framing
        if exchange is None or framing is None:
            return
        if not exchange.body and framing.remaining is not None and framing.remaining <= len(self._input.data):
            # It came with its head, as nearly all bodies do. It is not counted, because its rest is not waited for.
            self._framing = self._deadline = None
            exchange.body.complete(bytes(framing.take(self._input.data)))
            self._read_while(has_room=True)
            return
        is_first = not exchange.body.num_taken
        if is_first and exchange.head.expects_continue and not self._input.data and not self.transport.is_closing():
            self.transport.write(CONTINUE)
        if exchange.body.is_streamed:
            self._set_deadline(exchange.body.patience_s(self._limits.body_timeout_s))
        self._advance()
        if self._framing is not None and exchange.body.is_wanted:
            self._table.note_receiving(self)

    def _take_body(self, exchange: Exchange, framing: BodyFraming) -> bool:
        try:
            exchange.body.feed(framing.take(self._input.data))
        except ApiError as error:
            self._break(error)
            return False
        if not framing.is_complete:
            if exchange.body.is_streamed and not exchange.closed:
                # The client's request is complete: the handler is still busy with it.
                self._deadline = None
            return False
        self._framing = self._deadline = None
        exchange.body.complete()
        if exchange.closed:
            self._wait()
        else:
            self._table.note_busy(self)
        return True

    def _break(self, error: ApiError) -> None:
        """Give up on the rest of a body: its reader gets the error, and the answer is the last."""
        exchange = self._exchange
        assert exchange is not None
        self._is_broken = True
        self._deadline = None
        exchange.body.fail(error)
        if exchange.closed:
            self._linger()

    def _wait(self) -> None:
        self._exchange = None
        self._is_head_timed = False
        # An answer that began before the drain has not said that it is the last.
        self._set_deadline(DRAIN_GRACE_S if self._table.is_draining else self._limits.keep_alive_s)
        self._table.note_waiting(self)

    def _refuse(self, error: ApiError) -> None:
        body = error.body()
        length = (b"content-length", b"%d" % len(body))
        own = (id_header(), length, (b"connection", b"close"))
        headers = [*self.default_headers, *error.response_headers(), *own]
        if not self.transport.is_closing():
            self.transport.write(head_bytes(error.status, headers) + body)
        self._linger()

    def _linger(self) -> None:
        """Send nothing more, and drop what comes until the client closes: closing at once could reset it."""
        self._exchange = self._framing = None
        self._input.clear()
        self._is_lingering = True
        if not self.transport.is_closing():
            has_unsent = self.transport.get_write_buffer_size() > 0
            self._set_deadline(self._limits.send_timeout_s if has_unsent else self._limits.linger_s)
            if not self.transport.can_write_eof():  # TLS knows no half-closed connection
                self.transport.close()
                return
            self.transport.write_eof()
            self._read_while(True)
            self._table.note_waiting(self)

    def _set_deadline(self, seconds: float) -> None:
        self._deadline = self._loop.time() + seconds


def _too_slow(part: str, timeout_s: float) -> ApiError:
    return ApiError(408, f"The request's {part} was not complete after {timeout_s:g} s.", code=f"{part}_timeout")
