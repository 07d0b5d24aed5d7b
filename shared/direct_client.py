"""A NATS client with short paths: it writes publications at once, and handles a message when its bytes come in.

The library takes a message through a stream reader, a queue and a task for each subscription, and a publication
through a queue and a task: four turns of the event loop for one exchange. Here a direct subscription is called from the
transport itself, and a publication is written by the call that makes it, as long as the connection takes bytes; the
others of the same turn of the event loop are written together when it ends. Everything else (handshake, pings, errors,
messages with headers, reconnecting) stays with the library.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, TypeVar, cast

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.aio.transport import TcpTransport
from nats.errors import (
    ConnectionClosedError,
    ConnectionReconnectingError,
    FlushTimeoutError,
    OutboundBufferLimitError,
)
from nats.protocol.command import hpub_cmd, pub_cmd
from nats.protocol.parser import AWAITING_CONTROL_LINE

# With more unsent bytes than that, publications wait here, where they are bounded.
MAX_UNSENT_BYTES = 64 << 10

_FLUSH_TIMEOUT_S = 10.0

# While the server is heard, its answer to a ping may be so late: it lies behind what a narrow link has still to bring.
_MAX_ANSWER_S = 20.0

_MESSAGE = re.compile(rb"MSG (\S+) (\d+) (?:(\S+) )?(\d+)\r\n")

Handler = Callable[[Msg], None]
T = TypeVar("T")

_log = logging.getLogger(__name__)


class DirectClient(Client):
    """A client of which some subscriptions are direct.

    Attributes:
        num_reads: Changes with every sign of life of the server.
        lost_callbacks: Called when the connection is lost: requests under way get no answer.
    """

    def __init__(self) -> None:
        super().__init__()
        self._handlers: dict[int, Handler] = {}
        # Something was written in this turn of the loop: the rest of the turn's publications go out together.
        self._is_corked = False
        # When the oldest open ping was sent, or the last answer came.
        self._pinged_at = 0.0
        self.num_reads = 0
        self.lost_callbacks: set[Callable[[], None]] = set()

    @property
    def is_writable(self) -> bool:
        """Whether a publication is written at once; False while NATS is away, or reads more slowly than we write."""
        return self._writable_transport() is not None

    async def wait_writable(self) -> None:
        """Wait while NATS is there but does not read."""
        if self.is_connected and not self.is_writable and self._transport is not None:
            await self._transport.drain()  # type: ignore[no-untyped-call]

    async def ping(self) -> asyncio.Future[bool]:
        """Ask the server for a sign of life; the future is done when it came, and never if the connection is lost."""
        answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        # As the library pings: data pending for a server that does not read is not waited for.
        self._write_pending()
        if not self._pongs:
            self._pinged_at = time.monotonic()
        await super()._send_ping(answer)
        return answer

    async def flush(self, timeout: float = _FLUSH_TIMEOUT_S) -> None:
        """Wait until the server has everything that was published so far.

        Raises:
            ConnectionClosedError: The connection is over for good.
            ConnectionReconnectingError: The server is away.
            FlushTimeoutError: That takes longer than `timeout` seconds. It may still happen.
        """
        if self.is_closed:
            raise ConnectionClosedError
        if not self.is_connected:
            raise ConnectionReconnectingError
        answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        # The library cancels the future when the time is over, and an answer that comes after that ends its reading.
        try:
            async with asyncio.timeout(timeout):
                await self._send_ping(answer)
                await asyncio.shield(answer)
        except TimeoutError:
            raise FlushTimeoutError from None

    def send(self, subject: str, payload: bytes = b"", reply: str = "", headers: bytes = b"") -> None:
        """Publish without waiting. Subjects must be ones that this system has made: they are not checked.

        `headers` are lines that end with CR LF each.

        Raises:
            ConnectionClosedError: The connection is over for good.
            OutboundBufferLimitError: NATS is away or stuck, and as much as may wait for it does.
        """
        if self.is_closed:
            raise ConnectionClosedError
        if headers:
            command = hpub_cmd(subject, reply, b"NATS/1.0\r\n" + headers + b"\r\n", payload)
        else:
            command = pub_cmd(subject, reply, payload)
        if len(command) + self._pending_data_size > self._max_pending_size and not self.is_writable:
            raise OutboundBufferLimitError
        self.stats["out_msgs"] += 1
        self.stats["out_bytes"] += len(payload)
        self._pending.append(command)
        self._pending_data_size += len(command)
        if not self._write_soon():
            self._leave_to_library()

    def write_at_end_of_turn(self) -> None:
        """Write what this turn of the event loop publishes from now on with one system call, when the turn ends."""
        if not self._is_corked:
            self._is_corked = True
            asyncio.get_running_loop().call_soon(self._uncork)

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Write all publications of the block with one system call."""
        was_corked, self._is_corked = self._is_corked, True
        try:
            yield
        finally:
            if not was_corked:
                self._uncork()

    async def subscribe_direct(self, subject: str, handler: Handler) -> Subscription:
        """Call `handler` with each message of a subject as it comes in; its exceptions are logged.

        Messages are never dropped, and the connection is not read while the handler runs: it must be quick.
        """

        async def handle(message: Msg) -> None:
            handler(message)

        # The callback gets messages that come in before the handler is registered.
        subscription = await self.subscribe(subject, cb=handle)
        self._handlers[subscription._id] = handler
        return subscription

    async def unless_lost(self, answer: Awaitable[T]) -> T:
        """Wait for answers of the server, and no longer than the connection lives: with it they are lost.

        The library waits for them until its timeout, over connections that came since.

        Raises:
            ConnectionReconnectingError: The connection was lost while they were waited for.
        """
        loop = asyncio.get_running_loop()

        def give_up() -> None:
            self.lost_callbacks.discard(give_up)
            scope.reschedule(loop.time())

        try:
            async with asyncio.timeout(None) as scope:
                self.lost_callbacks.add(give_up)
                return await answer
        except TimeoutError:
            if scope.expired():
                raise ConnectionReconnectingError from None
            raise
        finally:
            self.lost_callbacks.discard(give_up)

    # Methods that the library calls.

    async def _process_connect_init(self) -> None:
        await super()._process_connect_init()
        transport = self._socket_transport()
        if transport is not None:
            is_tls = transport.get_extra_info("ssl_object") is not None
            transport.set_protocol(_Tap(transport.get_protocol(), self._take, is_tls))

    async def _attempt_reconnect(self) -> None:
        for callback in list(self.lost_callbacks):
            callback()
        await super()._attempt_reconnect()

    async def _flush_pending(self, force_flush: bool = False) -> Any:
        if force_flush or not self._write_soon():
            return await super()._flush_pending(force_flush)
        return None

    async def _send_ping(self, future: asyncio.Future[bool] | None = None) -> None:
        if not self._pongs:
            self._pinged_at = time.monotonic()
        # The library writes a ping past pending data. The answer to an awaited ping proves that the server has all that
        # was published before.
        if not self._write_pending() and future is not None:
            await super()._flush_pending(force_flush=True)
        await super()._send_ping(future)

    async def _process_pong(self) -> None:
        self._pinged_at = time.monotonic()
        await super()._process_pong()

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes) -> None:
        handler = self._handlers.get(sid)
        if handler is None or sid not in self._subs:
            await super()._process_msg(sid, subject, reply, data, headers)
            return
        self._handle(handler, sid, subject, reply, data, await self._process_headers(headers))

    def _remove_sub(self, sid: int, max_msgs: int = 0) -> None:
        super()._remove_sub(sid, max_msgs)
        self._handlers.pop(sid, None)

    # The short ways.

    def _socket_transport(self) -> asyncio.Transport | None:
        transport = self._transport
        if not isinstance(transport, TcpTransport) or transport._io_writer is None:
            return None
        return cast("asyncio.Transport", transport._io_writer.transport)

    def _open_transport(self) -> asyncio.Transport | None:
        """Return the transport unless it is closing, which it may be for a moment before the library notices."""
        transport = self._socket_transport()
        return None if transport is None or transport.is_closing() else transport

    def _writable_transport(self) -> asyncio.Transport | None:
        transport = self._open_transport()
        if transport is None or not self.is_connected or transport.get_write_buffer_size() >= MAX_UNSENT_BYTES:
            return None
        return transport

    def _write_soon(self) -> bool:
        """Write pending data, now or at the end of this turn; return False if the connection takes nothing now."""
        if self._is_corked:
            return True
        if not self._write_pending():
            return False
        self.write_at_end_of_turn()
        return True

    def _uncork(self) -> None:
        self._is_corked = False
        if self._pending and not self._write_pending():
            self._leave_to_library()

    def _leave_to_library(self) -> None:
        """Let the library write pending data when the connection takes bytes again, or is back."""
        if self._open_transport() is None:
            return  # it is written once there is a connection again
        if self.is_connected and self._flush_queue is not None and self._flush_queue.empty():
            self._flush_queue.put_nowait(asyncio.get_running_loop().create_future())

    def _write_pending(self) -> bool:
        """Write pending data, if the connection takes it now; return whether it did."""
        transport = self._writable_transport()
        if transport is None:
            return False
        pending, self._pending = self._pending, []
        self._pending_data_size = 0
        if pending:
            transport.write(pending[0] if len(pending) == 1 else b"".join(pending))
        return True

    def _take(self, data: bytes) -> bytes:
        """Handle the complete messages at the front that are for direct subscriptions; return the rest."""
        self.num_reads += 1
        if self._pings_outstanding and time.monotonic() - self._pinged_at < _MAX_ANSWER_S:
            # The library would give a connection up after two pings, over which all the same something comes in.
            self._pings_outstanding = 0
        parser = self._ps
        transport: Any = self._transport
        reader = transport._io_reader
        # Earlier bytes that the library has not parsed yet come first.
        if parser.buf or parser.state != AWAITING_CONTROL_LINE or reader is None or reader._buffer:
            return data
        position = 0
        while match := _MESSAGE.match(data, position):
            sid, start = int(match[2]), match.end()
            end = start + int(match[4])
            handler = self._handlers.get(sid)
            if handler is None or end + 2 > len(data) or sid not in self._subs:
                break
            self._handle(handler, sid, match[1], match[3] or b"", data[start:end], None)
            position = end + 2
        return data[position:] if position else data

    def _handle(
        self, handler: Handler, sid: int, subject: bytes, reply: bytes, data: bytes, headers: dict[str, str] | None
    ) -> None:
        self.stats["in_msgs"] += 1
        self.stats["in_bytes"] += len(data)
        try:
            handler(self._build_message(sid, bytes(subject), bytes(reply), data, headers))
        except Exception:
            _log.exception("a message on %s could not be handled", bytes(subject).decode(errors="replace"))


class _Tap(asyncio.Protocol):
    """Stands before the library's own protocol, and lets the direct client take the bytes that it can handle."""

    def __init__(self, inner: asyncio.BaseProtocol, take: Callable[[bytes], bytes], is_tls: bool) -> None:
        self._inner = cast("asyncio.Protocol", inner)
        self._take = take
        self._is_tls = is_tls

    def data_received(self, data: bytes) -> None:
        rest = self._take(data)
        if rest:
            self._inner.data_received(rest)

    def eof_received(self) -> bool | None:
        is_kept_open = self._inner.eof_received()
        # Clear text may stay half open. TLS cannot, and asyncio warns when a protocol asks for it.
        return None if self._is_tls else is_kept_open

    def connection_lost(self, exc: Exception | None) -> None:
        self._inner.connection_lost(exc)

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()
