"""How a family of APIs tells its clients about events, errors and the end of a stream."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gateway.errors import ApiError

COMMENT = b": keep-alive\n\n"
"""What clients of server-sent events read over."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """The bytes that are not part of an answer's content.

    Attributes:
        error_body: The JSON body of an error.
        error_event: The event of an error in mid-stream.
        end_of_stream: The last bytes of every event stream.
        keep_alive: What is sent in long silence.
        id_headers: Headers that name the request, beside `x-request-id`.
        client_header: Header that its clients alone send. Errors of paths that are no API's own are told in this form
            to whoever sends it.
    """

    error_body: Callable[[ApiError], bytes]
    error_event: Callable[[ApiError], bytes]
    end_of_stream: bytes
    keep_alive: bytes
    id_headers: tuple[bytes, ...] = ()
    client_header: bytes | None = None


def server_sent_event(data: bytes, name: str = "") -> bytes:
    """Return the bytes of an event, with a name where one is given; `data` is one line."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), data) if name else b"data: " + data + b"\n\n"


def openai_error_event(error: ApiError) -> bytes:
    """Return an error as OpenAI's streams tell it."""
    return server_sent_event(error.body())


OPENAI = Dialect(ApiError.body, openai_error_event, server_sent_event(b"[DONE]"), COMMENT)
