"""Typed events of a streamed response, in order: each has its type twice, as OpenAI's, and the number of its place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from gateway.errors import ApiError
from gateway.responses.draft import Status
from gateway.streams.dialect import COMMENT, Dialect, server_sent_event

_END_EVENTS: dict[Status, str] = {
    "completed": "response.completed",
    "incomplete": "response.incomplete",
    "failed": "response.failed",
    # OpenAI's API has no event of its own for it.
    "cancelled": "response.failed",
}
_encode = msgspec.json.Encoder().encode


class EventWriter:
    """Numbers events and writes them as bytes.

    Attributes:
        num_events: Events so far, which is the number of the next one.
    """

    def __init__(self, write: Callable[[bytes], None], starting_after: int = -1) -> None:
        """Pass events to `write`, but for those whose number is not above `starting_after`."""
        self._write = write
        self._starting_after = starting_after
        self.num_events = 0

    def emit(self, kind: str, fields: dict[str, Any]) -> None:
        """Write one event."""
        number = self.num_events
        self.num_events += 1
        if number > self._starting_after:
            self._write(encode_event(kind, fields, number))

    def begin(self, response: dict[str, Any]) -> None:
        """Write the events that begin the stream of a response that is in progress."""
        self.emit("response.created", {"response": response})
        self.emit("response.in_progress", {"response": response})

    def end(self, response: dict[str, Any]) -> None:
        """Write the event that ends the stream, with the whole response.

        Whoever has seen it gets nothing more. A client whose number is beyond it has seen events of a text that was
        lost with its worker, and this event is new to it.
        """
        if self.num_events < self._starting_after:
            self._starting_after = -1
        self.emit(_END_EVENTS[response["status"]], {"response": response})


def encode_event(kind: str, fields: dict[str, Any], number: int) -> bytes:
    """Return the bytes of one event."""
    return server_sent_event(_encode({"type": kind, **fields, "sequence_number": number}), kind)


def error_event(error: ApiError, number: int = 0) -> bytes:
    """Return an error in both forms: the documented one, and the nested one by which clients know that it is one.

    `number` is that of the event before it: whoever goes on after the last number that it has seen misses nothing.
    """
    fields = {"code": error.code, "message": error.message, "param": error.param}
    return encode_event("error", fields | {"error": {"type": error.type, **fields}}, number)


RESPONSES = Dialect(ApiError.body, error_event, b"", COMMENT)
"""Errors are OpenAI's; in a stream they are events of their own, and the last event ends it."""
