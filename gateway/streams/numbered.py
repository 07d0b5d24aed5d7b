"""An event stream whose events have ids, so that a disconnected client can resume after the last one that it has.

The ids count the events of the whole answer from 0. A replay of the answer writes all of its events, and the stream
leaves out those before the first one that its client wants. Comments and events about this connection alone have no
id: they are not events of the answer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from gateway.errors import ApiError
from gateway.http1.exchange import Exchange, Headers
from gateway.streams.dialect import COMMENT, Dialect
from gateway.streams.event_stream import EventStream, EventStreamLimits, Flusher

MAX_EVENT = 10**9
"""More than any answer has events."""

# OpenAI's libraries take the empty line behind a comment for the end of an event once they have seen an id.
_COMMENT_LINE = COMMENT[:-1]


class NumberedEventStream(EventStream):
    """An event stream with ids.

    Attributes:
        num_events: Events of the answer so far, including omitted ones.
        has_ids: False for events about this connection alone.
    """

    __slots__ = ("_end_of_answer", "_first_event", "_refuse", "has_ids", "num_events")

    def __init__(
        self,
        exchange: Exchange,
        flusher: Flusher,
        limits: EventStreamLimits,
        head: Callable[[], Headers],
        now: float,
        dialect: Dialect,
        on_cut: Callable[[], None],
        first_event: int,
        refuse: Callable[[ApiError], None],
    ) -> None:
        """Send the events from the number `first_event` on; the rest is as in `EventStream`.

        `refuse` answers with an error where the client wants an event that the answer does not have.
        """
        self._end_of_answer = dialect.end_of_stream
        self._first_event = first_event
        self._refuse = refuse
        self.num_events = 0
        self.has_ids = True
        keep_alive = _COMMENT_LINE if dialect.keep_alive == COMMENT else dialect.keep_alive
        super().__init__(
            exchange, flusher, limits, head, now, replace(dialect, end_of_stream=b"", keep_alive=keep_alive), on_cut
        )

    @property
    def is_behind(self) -> bool:
        """Whether the client wants an event behind the next one."""
        return self._first_event > self.num_events

    def send(self, event: bytes) -> None:
        """Add events to the next flush."""
        if data := self._numbered(event):
            if not self._unflushed:
                self._flusher.add(self)
            self._unflushed += data

    def send_event(self, event: bytes) -> None:
        """Add exactly one event to the next flush. This runs once per token and stream."""
        number = self.num_events
        self.num_events = number + 1
        if number >= self._first_event:
            if not self._unflushed:
                self._flusher.add(self)
            self._unflushed += b"id: %d\n%b" % (number, event)

    def send_now(self, event: bytes) -> None:
        """Write events at once, or a comment."""
        is_comment = event == self._dialect.keep_alive and self.num_events > 0
        if data := event if is_comment else self._numbered(event):
            super().send_now(data)

    def end(self, last: bytes = b"") -> None:
        """Write the last events. A client that has them all gets a 204: a browser reconnects otherwise."""
        if not self.has_ids:
            super().end(last + self._end_of_answer)
            return
        data = self._numbered(last + self._end_of_answer)
        if data or self._exchange.started or self._unflushed:
            super().end(data)
        elif self.is_behind:
            self._refuse(self.beyond())
        else:
            self._exchange.respond(204, self._head(), b"")

    def close(self) -> None:
        """Let go of the owner's callbacks."""
        super().close()
        self._refuse = _ignore

    def beyond(self) -> ApiError:
        """Return the error for a client that wants an event that does not exist yet."""
        num = self.num_events
        last = f", 'Last-Event-ID' at most {num - 1}" if num else ""
        message = f"The stream has {num} events so far: 'from' must be at most {num}{last}."
        return ApiError(400, message, param="from", code="invalid_value")

    def _numbered(self, data: bytes) -> bytes:
        number = self.num_events
        # The usual token is one event, most often of one line: looking for one byte takes a third of the time of two.
        if data.find(b"\n") == len(data) - 2 or data.find(b"\n\n") == len(data) - 2:
            self.num_events = number + 1
            return b"id: %d\n%b" % (number, data) if number >= self._first_event else b""
        events = data.split(b"\n\n")[:-1]
        self.num_events += len(events)
        kept = enumerate(events, number)
        return b"".join(b"id: %d\n%b\n\n" % (at, event) for at, event in kept if at >= self._first_event)


def _ignore(error: ApiError) -> None:
    """Take the place of a callback that is not wanted any more."""
