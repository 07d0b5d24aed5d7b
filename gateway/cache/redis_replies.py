"""Replies of Redis (RESP 2) out of bytes, in whatever pieces they come; no more is kept than was sent.

A reply is bytes, an integer, None, a list of replies, or an error as a value.
"""

from __future__ import annotations

from redis.exceptions import AuthenticationError, BusyLoadingError, NoScriptError, RedisError, ResponseError

MAX_LINE_BYTES = 64 << 10
MAX_DEPTH = 8

Reply = bytes | int | None | RedisError | list["Reply"]

# The errors that mean more than that this command was refused.
_ERRORS: dict[bytes, type[RedisError]] = {
    b"NOSCRIPT": NoScriptError,
    b"LOADING": BusyLoadingError,
    b"NOAUTH": AuthenticationError,
}


class ReplyParser:
    """Owns what has come of a reply that is not complete."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> list[Reply]:
        """Add bytes and return the replies that are complete now.

        Raises:
            ValueError: These are not replies.
        """
        self._data += data
        replies: list[Reply] = []
        position = 0
        while position < len(self._data):
            found = self._reply(position, MAX_DEPTH)
            if found is None:
                break
            reply, position = found
            replies.append(reply)
        del self._data[:position]
        return replies

    def _reply(self, position: int, depth: int) -> tuple[Reply, int] | None:
        """Return the reply at a position and where it ends; None while it is incomplete."""
        data = self._data
        end = data.find(b"\r\n", position, position + MAX_LINE_BYTES)
        if end < 0:
            if len(data) - position >= MAX_LINE_BYTES:
                raise ValueError("a reply's line has no end")
            return None
        kind, line, start = data[position : position + 1], bytes(data[position + 1 : end]), end + 2
        if kind == b"+":
            return line, start
        if kind == b":":
            return int(line), start
        if kind == b"$":
            return self._bulk(int(line), start)
        if kind == b"*":
            return self._list(int(line), start, depth)
        if kind == b"-":
            return _error(line), start
        raise ValueError(f"a reply begins with {bytes(kind)!r}")

    def _bulk(self, length: int, start: int) -> tuple[Reply, int] | None:
        if length < 0:
            return None, start
        end = start + length
        if len(self._data) < end + 2:
            return None
        if self._data[end : end + 2] != b"\r\n":
            raise ValueError("a value is longer than its length says")
        return bytes(self._data[start:end]), end + 2

    def _list(self, length: int, start: int, depth: int) -> tuple[Reply, int] | None:
        if length < 0:
            return None, start
        if depth == 0:
            raise ValueError("a reply is nested too deeply")
        items: list[Reply] = []
        for _ in range(length):
            found = self._reply(start, depth - 1)
            if found is None:
                return None
            item, start = found
            items.append(item)
        return items, start


def _error(line: bytes) -> RedisError:
    name, _, message = line.partition(b" ")
    kind = _ERRORS.get(name)
    return ResponseError(line.decode(errors="replace")) if kind is None else kind(message.decode(errors="replace"))
