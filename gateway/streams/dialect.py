"""How a family of APIs tells its clients about events, errors and the end of a stream."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gateway.errors import ApiError

COMMENT = b": keep-alive\n\n"
"""Clients of server-sent events ignore comments."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """The bytes that are not part of an answer's content.

    Attributes:
        error_body: The JSON body of an error.
        error_event: The event of an error in mid-stream.
        end_of_stream: The last bytes of every event stream.
        keep_alive: Sent in long silence.
        id_headers: Headers that name the request, beside `x-request-id`.
        client_header: Header that only its clients send. They get errors in this format at paths that belong to no
            API.
    """

    error_body: Callable[[ApiError], bytes]
    error_event: Callable[[ApiError], bytes]
    end_of_stream: bytes
    keep_alive: bytes
    id_headers: tuple[bytes, ...] = ()
    client_header: bytes | None = None


def one_line(data: bytes) -> bytes:
    """Return JSON without the characters of Unicode that end a line, which stand escaped instead.

    In an event stream they end none. But clients that split it as Python splits a text (`str.splitlines`, and so
    `iter_lines` of httpx) find half an event.
    """
    return (
        data.replace(b"\xe2\x80\xa8", rb"\u2028").replace(b"\xe2\x80\xa9", rb"\u2029").replace(b"\xc2\x85", rb"\u0085")
    )


def server_sent_event(data: bytes, name: str = "") -> bytes:
    """Return the bytes of an event, with a name where one is given; `data` is one line, of JSON mostly."""
    data = data if data.isascii() else one_line(data)
    return b"event: %b\ndata: %b\n\n" % (name.encode(), data) if name else b"data: " + data + b"\n\n"


def openai_error_event(error: ApiError) -> bytes:
    """Return an error as OpenAI's streams tell it."""
    return server_sent_event(error.body())


OPENAI = Dialect(ApiError.body, openai_error_event, server_sent_event(b"[DONE]"), COMMENT)
