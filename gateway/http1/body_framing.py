"""Where a request's body ends: after a length, or after its last chunk and the trailers.

A framing takes its bytes from the front of the connection's input, as they come, and returns those of the body. It owns
its position in the message and nothing else. Both kinds are as strict as RFC 9112 allows.
"""

from __future__ import annotations

import re

from gateway.errors import ApiError
from gateway.http1.head import bad_request

MAX_CHUNK_LINE_BYTES = 1 << 10
MAX_TRAILER_BYTES = 8 << 10
# What chunk lines may cost beyond 16 bytes a chunk and as much as the body they carry.
MAX_FRAMING_BYTES = 16 << 10
FREE_BYTES_A_CHUNK = 16

_CHUNK_LINE = re.compile(rb"([0-9A-Fa-f]{1,15})(?:[ \t]*;[^\x00-\x08\x0a-\x1f\x7f]*)?")
_TRAILER = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+:[^\x00-\x08\x0a-\x1f\x7f]*")


class LengthFraming:
    """A body of an announced length. `remaining` bytes are still to come; a chunked body does not know how many."""

    __slots__ = ("remaining",)

    def __init__(self, length: int) -> None:
        self.remaining = length

    @property
    def is_complete(self) -> bool:
        """Whether all bytes have been taken."""
        return self.remaining == 0

    def take(self, source: bytearray) -> bytearray:
        """Remove this body's bytes from the front of `source` and return them."""
        piece = source[: self.remaining]
        del source[: self.remaining]
        self.remaining -= len(piece)
        return piece


class ChunkedFraming:
    """A body in chunks. Extensions and trailers are checked, bounded and dropped."""

    __slots__ = ("_framing_bytes", "_in_trailers", "_left_in_chunk", "_trailer_bytes", "is_complete")

    remaining: int | None = None

    def __init__(self) -> None:
        self.is_complete = False
        # Bytes of the chunk that are still to come, its final line break included.
        self._left_in_chunk = 0
        self._framing_bytes = 0
        self._in_trailers = False
        self._trailer_bytes = 0

    def take(self, source: bytearray) -> bytearray:
        """Remove the body's bytes from the front of `source`; return the payload. `ApiError` 400 or 431 if broken."""
        payload = bytearray()
        # Removing from the front of a long source for each short chunk would move its bytes again and again.
        position = 0
        try:
            while not self.is_complete:
                start = position
                position = self._step(source, position, payload)
                if position == start:
                    break
        finally:
            del source[:position]
        return payload

    def _step(self, source: bytearray, position: int, payload: bytearray) -> int:
        """Take one line or one run of payload; return the new position, unchanged if more bytes are needed."""
        if self._left_in_chunk > 2:
            run = source[position : position + self._left_in_chunk - 2]
            payload += run
            self._left_in_chunk -= len(run)
            return position + len(run)
        if self._left_in_chunk:
            return self._end_chunk(source, position)
        limit = MAX_TRAILER_BYTES if self._in_trailers else MAX_CHUNK_LINE_BYTES
        end = source.find(b"\r\n", position, position + limit)
        if end < 0:
            if len(source) - position >= limit:
                raise self._too_long()
            return position
        line = bytes(source[position:end])
        if self._in_trailers:
            self._take_trailer(line)
        else:
            self._begin_chunk(line)
        return end + 2

    def _end_chunk(self, source: bytearray, position: int) -> int:
        if len(source) - position < 2:
            return position
        if source[position : position + 2] != b"\r\n":
            raise bad_request("A chunk is longer than its size says.")
        self._left_in_chunk = 0
        return position + 2

    def _begin_chunk(self, line: bytes) -> None:
        match = _CHUNK_LINE.fullmatch(line)
        if match is None:
            raise bad_request("A chunk must begin with its size in hexadecimal digits.")
        size = int(match[1], 16)
        self._framing_bytes = max(0, self._framing_bytes + len(line) - FREE_BYTES_A_CHUNK - size)
        if self._framing_bytes > MAX_FRAMING_BYTES:
            raise bad_request("The body's chunks carry more framing than payload.")
        if size == 0:
            self._in_trailers = True
        else:
            self._left_in_chunk = size + 2

    def _take_trailer(self, line: bytes) -> None:
        if not line:
            self.is_complete = True
            return
        self._trailer_bytes += len(line) + 2
        if self._trailer_bytes > MAX_TRAILER_BYTES:
            raise self._too_long()
        if _TRAILER.fullmatch(line) is None:
            raise bad_request("A trailer is not a header field.")

    def _too_long(self) -> ApiError:
        if self._in_trailers:
            message = f"The body's trailers exceed {MAX_TRAILER_BYTES} bytes."
            return ApiError(431, message, code="headers_too_large")
        return bad_request(f"A chunk's first line exceeds {MAX_CHUNK_LINE_BYTES} bytes.")


BodyFraming = LengthFraming | ChunkedFraming
