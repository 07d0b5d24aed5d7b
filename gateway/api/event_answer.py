"""What the streamed answers of all endpoints have in common: one event stream, its end, and its errors."""

from __future__ import annotations

from functools import partial

from gateway.api.answer import Answer, Outcome, ResponseHead
from gateway.errors import ApiError
from gateway.generation import Generation
from gateway.http1.exchange import Exchange, Headers
from gateway.streams.event_stream import EVENT_STREAM_HEADERS, EventStream, EventStreamLimits, Flusher


class EventAnswer(Answer):
    """Base of answers that are event streams. Derived classes set `sinks` and write to `_stream`."""

    def __init__(
        self,
        exchange: Exchange,
        generation: Generation,
        head: ResponseHead,
        flusher: Flusher,
        limits: EventStreamLimits,
        now: float,
    ) -> None:
        """Prepare the stream. `now` is loop time."""
        super().__init__(exchange, generation, head)
        cut = partial(self.end, Outcome.SLOW_READER)
        self._stream = EventStream(exchange, flusher, limits, self._headers, now, head.dialect, cut)

    def close(self) -> None:
        """Let go of what refers back to the answer."""
        super().close()
        self._stream.close()

    def tick(self, now: float) -> None:
        """Let the stream react to silence and slowness. `now` is loop time."""
        if not self.done.done():
            self._stream.tick(now)

    def _headers(self) -> Headers:
        return self._head.headers(EVENT_STREAM_HEADERS)

    def _report(self, error: ApiError) -> None:
        if self._stream.is_open:
            self._stream.end(self._head.dialect.error_event(error))
        else:
            super()._report(error)
