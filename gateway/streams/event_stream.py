"""Server-sent events on one exchange: adaptive flush, keep-alives, and the end of a slow reader.

An event stream owns the bytes that its sinks have said and the transport has not taken. While the transport is paused
they are held up to a bound; a reader slower than that, or stuck for longer than the send timeout, is cut: it costs
itself, not its neighbours. A stream that is cut says so by an error event.

Adaptive flush: the kernel's send is most of what a streamed token costs, so the next flush waits as long as the last
one took, a tenth of a second at most. An idle gateway flushes each token at once, a saturated one spends half its time
sending and packs what has come meanwhile into one write per stream. A stream's first token does not wait for a flush.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from gateway.errors import ApiError
from gateway.http1.exchange import Exchange, Headers
from gateway.streams.dialect import OPENAI, Dialect

MAX_DELAY_S = 0.1

EVENT_STREAM_HEADERS: Headers = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EventStreamLimits:
    """The bounds of a stream's buffer and waits.

    Attributes:
        buffer_bytes: Bytes held for a reader that does not read, beyond what the transport holds.
        send_timeout_s: Time for which a reader may take nothing at all.
        head_delay_s: Time for which the status may wait for the first token, or for an error to report in it.
        keep_alive_s: Silence before the first token after which a comment is sent.
    """

    buffer_bytes: int = 1 << 20
    send_timeout_s: float = 30.0
    head_delay_s: float = 1.0
    keep_alive_s: float = 10.0


class Flusher:
    """Collects streams that have something to send, and flushes them together."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: list[EventStream] = []
        self._not_before = 0.0
        self._is_scheduled = False

    def add(self, stream: EventStream) -> None:
        """Flush `stream` with the next flush. A stream adds itself once, when its buffer stops being empty."""
        self._waiting.append(stream)
        if not self._is_scheduled:
            self._is_scheduled = True
            delay = self._not_before - time.monotonic()
            if delay > 0:
                self._loop.call_later(delay, self._flush)
            else:
                self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        # Not `loop.time()`: uvloop computes that once per loop iteration, in milliseconds.
        started = time.monotonic()
        self._is_scheduled = False
        streams, self._waiting = self._waiting, []
        for stream in streams:
            try:
                stream.flush()
            except Exception:
                _logger.exception("a stream could not be flushed")
        ended = time.monotonic()
        self._not_before = ended + min(MAX_DELAY_S, ended - started)


class _SendPath:
    """The fields that each event reads, in one place of memory as in `_Progress` of a flight."""

    __slots__ = ("_exchange", "_flusher", "_has_written", "_unflushed")

    _exchange: Exchange
    _flusher: Flusher
    _has_written: bool
    _unflushed: bytes


class EventStream(_SendPath):
    """Bytes of one streamed answer, between the sinks that write them and the transport that takes them."""

    __slots__ = (
        "_dialect",
        "_head",
        "_held",
        "_held_size",
        "_limits",
        "_on_cut",
        "_quiet_since",
    )

    def __init__(
        self,
        exchange: Exchange,
        flusher: Flusher,
        limits: EventStreamLimits,
        head: Callable[[], Headers],
        now: float,
        dialect: Dialect = OPENAI,
        on_cut: Callable[[], None] | None = None,
    ) -> None:
        """Wait for the first bytes, at loop time `now`.

        `head` gives the headers when they are needed; `on_cut` is called once if the reader was too slow.
        """
        self._dialect = dialect
        self._exchange = exchange
        self._flusher = flusher
        self._limits = limits
        self._head = head
        self._unflushed = b""
        self._held: list[bytes] = []
        self._held_size = 0
        self._quiet_since = now
        self._has_written = False
        self._on_cut = on_cut
        exchange.on_writable = self._resume

    @property
    def is_open(self) -> bool:
        """Whether the status is out, so that an error can only be an event."""
        return self._exchange.started

    def send(self, event: bytes) -> None:
        """Add bytes to the next flush. This runs once per token and stream."""
        if not self._unflushed:
            self._flusher.add(self)
        self._unflushed += event

    send_event = send
    """Add the bytes of exactly one event to the next flush."""

    def send_now(self, event: bytes) -> None:
        """Write bytes at once, after the buffered ones."""
        self._unflushed += event
        self.flush()

    def flush(self) -> None:
        """Write the buffered bytes, or hold them while the transport is paused."""
        data = self._unflushed
        if not data:
            return
        self._unflushed = b""
        self._has_written = True
        exchange = self._exchange
        if exchange.paused_since is not None:
            self._hold(data)
            return
        if not exchange.started:
            exchange.start(200, self._head())
        exchange.write(data)

    def end(self, last: bytes = b"") -> None:
        """Write the last bytes and the end of the stream, and complete the response."""
        data = b"".join((*self._held, self._unflushed, last, self._dialect.end_of_stream))
        self._unflushed = b""
        self._held.clear()
        if not self._exchange.started:
            self._exchange.start(200, self._head())
        self._exchange.finish(data)

    def close(self) -> None:
        """Let go of the owner's callbacks."""
        self._on_cut = None
        self._head = tuple

    def tick(self, now: float) -> None:
        """Do what silence and slowness call for: open the stream, keep it alive, or cut it. `now` is loop time."""
        paused_since = self._exchange.paused_since
        if paused_since is not None and now - paused_since > self._limits.send_timeout_s:
            self._cut(f"nothing was read for {self._limits.send_timeout_s:g} s")
            return
        if self._has_written:
            self._has_written = False
            self._quiet_since = now
            return
        limit_s = self._limits.keep_alive_s if self._exchange.started else self._limits.head_delay_s
        if now - self._quiet_since > limit_s:
            self.send_now(self._dialect.keep_alive)

    def _hold(self, data: bytes) -> None:
        self._held.append(data)
        self._held_size += len(data)
        if self._held_size > self._limits.buffer_bytes:
            self._cut(f"more than {self._limits.buffer_bytes} bytes were waiting to be read")

    def _resume(self) -> None:
        if self._held:
            data = b"".join(self._held)
            self._held.clear()
            self._held_size = 0
            self._exchange.write(data)

    def _cut(self, why: str) -> None:
        if self._exchange.closed:
            return
        self._held.clear()
        self._unflushed = b""
        error = ApiError(408, f"The stream was cut because {why}.", code="slow_reader")
        self._exchange.finish_and_close(self._dialect.error_event(error) + self._dialect.end_of_stream)
        if self._on_cut is not None:
            self._on_cut()
