"""How a family of APIs tells its clients about errors and about the end of a stream."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gateway.errors import ApiError


@dataclass(frozen=True, slots=True)
class Dialect:
    """The bytes that are not part of an answer's content.

    Attributes:
        error_body: The JSON body of an error.
        error_event: The event of an error in mid-stream.
        end_of_stream: The last bytes of every event stream.
        keep_alive: What is sent in long silence.
    """

    error_body: Callable[[ApiError], bytes]
    error_event: Callable[[ApiError], bytes]
    end_of_stream: bytes
    keep_alive: bytes


def openai_error_event(error: ApiError) -> bytes:
    """Return an error as OpenAI's streams tell it."""
    return b"data: " + error.body() + b"\n\n"


OPENAI = Dialect(ApiError.body, openai_error_event, b"data: [DONE]\n\n", b": keep-alive\n\n")
