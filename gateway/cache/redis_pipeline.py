"""One established connection to Redis: commands out, replies in, without a task or a reader between.

A command is written at once if nothing is under way; commands that come meanwhile travel together when the replies are
here. The first failure ends the pipeline, because its replies can no longer be told apart. A reply (RESP 2) is bytes,
an integer, None, a list of replies, or an error as a value.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

from redis.asyncio.connection import AbstractConnection
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
        """Add bytes and return the replies that are complete now; `ValueError` for malformed bytes."""
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


MAX_PIPELINE = 128

Argument = str | bytes | int | float
Call = tuple[tuple[Argument, ...], asyncio.Future[Any]]


class RedisPipeline(asyncio.Protocol):
    """Owns the commands that wait and those that are under way. Every call ends: with its reply, or with None."""

    def __init__(
        self,
        connection: AbstractConnection,
        timeout_s: float,
        on_broken: Callable[[RedisPipeline, BaseException, int], None],
    ) -> None:
        writer = connection._writer
        assert writer is not None
        self.connection = connection
        self._transport = writer.transport
        self._timeout_s = timeout_s
        self._on_broken = on_broken
        self.has_succeeded = False
        self._loop = asyncio.get_running_loop()
        self._parser = ReplyParser()
        self._waiting: deque[Call] = deque()
        self._under_way: deque[asyncio.Future[Any]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False
        self._transport.set_protocol(self)

    def call(self, command: tuple[Argument, ...]) -> asyncio.Future[Any]:
        """Send a command; the future gets its reply, an error included, or None."""
        future: asyncio.Future[Any] = self._loop.create_future()
        if self._is_closed:
            future.set_result(None)
            return future
        self._waiting.append((command, future))
        if not self._under_way:
            self._send()
        return future

    def close(self) -> int:
        """Cut the connection; return how many calls are missed by that."""
        self._is_closed = True
        self._transport.abort()
        if self._timer is not None:
            self._timer.cancel()
        missed = [*self._under_way, *(future for _, future in self._waiting)]
        self._under_way.clear()
        self._waiting.clear()
        for future in missed:
            if not future.done():
                future.set_result(None)
        return len(missed)

    # What asyncio calls.

    def data_received(self, data: bytes) -> None:
        """Give calls their replies."""
        if self._is_closed:
            return
        try:
            for reply in self._parser.feed(data):
                self._take(reply)
        except Exception as error:
            # Also what parsing a hostile reply may raise: the rest of it must not answer the next calls.
            self._break(error)
            return
        if not self._under_way and not self._is_closed:
            if self._timer is not None:
                self._timer.cancel()
            self.has_succeeded = True
            if self._waiting:
                self._send()

    def connection_lost(self, exc: Exception | None) -> None:
        """Give up."""
        self._break(exc or ConnectionResetError("Redis has closed the connection"))

    def _send(self) -> None:
        commands: list[tuple[Argument, ...]] = []
        while self._waiting and len(commands) < MAX_PIPELINE:
            command, future = self._waiting.popleft()
            commands.append(command)
            self._under_way.append(future)
        self._timer = self._loop.call_later(self._timeout_s, self._break, TimeoutError("no reply in time"))
        try:
            self._transport.write(b"".join(self.connection.pack_commands(commands)))
        except Exception as error:
            self._break(error)

    def _take(self, reply: Reply) -> None:
        if not self._under_way:
            raise ValueError("a reply to nothing")
        if isinstance(reply, RedisError) and not isinstance(reply, ResponseError):
            # The server itself is not ready.
            raise reply
        future = self._under_way.popleft()
        if not future.done():
            future.set_result(reply)

    def _break(self, error: BaseException) -> None:
        if not self._is_closed:
            self._on_broken(self, error, self.close())
