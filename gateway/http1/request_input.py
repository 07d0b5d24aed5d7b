"""The bytes that one connection has received and not passed on: heads, bodies and pipelined requests.

Holds `MAX_HEAD_BYTES` at most; the connection stops reading while it is full. Finds the end of a head without looking
at a byte twice, however slowly the head drips in. A client that keeps its connection mostly sends one head again and
again: the last one is remembered in its parsed form, unless it is long.
"""

from __future__ import annotations

from gateway.http1.head import MAX_HEAD_BYTES, RequestHead, bad_request, head_too_large, parse_head

MAX_BLANK_BYTES = 64
# What an idle connection keeps of its last head at most; in memory it is about three times as much.
MAX_REMEMBERED_BYTES = 1 << 10


class RequestInput:
    """Unparsed bytes, in order."""

    __slots__ = ("_last", "_last_bytes", "_num_blank", "_searched", "data")

    def __init__(self) -> None:
        self.data = bytearray()
        self._searched = 0
        self._num_blank = 0
        self._last_bytes = b""
        self._last: RequestHead | None = None

    @property
    def room(self) -> int:
        """Number of bytes that may still be added."""
        return MAX_HEAD_BYTES - len(self.data)

    @property
    def has_begun_head(self) -> bool:
        """Whether there is a part of a head, if only an empty line before it."""
        return bool(self.data) or self._num_blank > 0

    def clear(self) -> None:
        """Forget everything."""
        self.data = bytearray()
        self._searched = self._num_blank = 0
        self._last_bytes, self._last = b"", None

    def take_head(self) -> RequestHead | None:
        """Remove and return the first head, one object for equal ones in a row; None while it is incomplete."""
        data = self.data
        if data[0] in b"\r\n" and not self._skip_blank():
            return None
        last = self._last
        if last is not None and data.startswith(self._last_bytes):
            self._remove(len(self._last_bytes))
            return last
        if not ord("A") <= data[0] <= ord("Z"):
            raise bad_request("The request does not begin with a method.")
        end = data.find(b"\r\n\r\n", self._searched) + 4
        if end < 4:
            if self.room <= 0:
                raise head_too_large()
            self._searched = max(0, len(data) - 3)
            return None
        return self._parse(self._remove(end))

    def _remove(self, end: int) -> bytes:
        head = bytes(self.data[:end])
        del self.data[:end]
        self._searched = self._num_blank = 0
        return head

    def _parse(self, data: bytes) -> RequestHead:
        head = parse_head(data)
        if len(data) <= MAX_REMEMBERED_BYTES:
            self._last, self._last_bytes = head, data
        return head

    def _skip_blank(self) -> bool:
        """Drop empty lines before a head; return whether something is left."""
        num_blank = len(self.data) - len(self.data.lstrip(b"\r\n"))
        del self.data[:num_blank]
        self._num_blank += num_blank
        if self._num_blank > MAX_BLANK_BYTES:
            raise bad_request("There are too many empty lines before the request.")
        return bool(self.data)
