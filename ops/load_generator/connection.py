"""Clients of event streams: raw HTTP/1.1 on asyncio protocols, so that they cost less than what they measure.

While an answer arrives, nothing but the time of each piece is noted, since the client may share the processor with what
it measures; `answer.read` looks at the bytes afterwards.
"""

from __future__ import annotations

import asyncio
import json
import re
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import urlsplit

_END = b"\r\n0\r\n\r\n"
_MAX_HEAD = 1 << 16
_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*(\d{1,15})[ \t]*\r\n", re.IGNORECASE)
_CHUNKED = re.compile(rb"\r\ntransfer-encoding:[ \t]*chunked[ \t]*\r\n", re.IGNORECASE)
_CLOSES = re.compile(rb"\r\nconnection:[ \t]*close[ \t]*\r\n", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server listens, and what it calls the model.

    Attributes:
        prefix: Path before `/v1`.
    """

    host: str
    port: int
    model: str
    api_key: str | None = "none"
    is_tls: bool = False
    prefix: str = ""

    @classmethod
    def of_url(cls, url: str, model: str, api_key: str | None) -> Address:
        """Return the address of a URL, whose path may end with `/v1`."""
        place = urlsplit(url)
        is_tls = place.scheme == "https"
        prefix = place.path.rstrip("/").removesuffix("/v1")
        return cls(place.hostname or "", place.port or (443 if is_tls else 80), model, api_key, is_tls, prefix)

    def post(self, path: str, body: Mapping[str, object], *, closes: bool = False) -> bytes:
        """Return a request; with `closes`, the server may close after it."""
        data = json.dumps(dict(body)).encode()
        host = f"[{self.host}]" if ":" in self.host else self.host
        lines = [f"POST {self.prefix}{path} HTTP/1.1", f"Host: {host}:{self.port}", "Content-Type: application/json"]
        lines += ["Connection: close"] if closes else []
        lines += [f"Authorization: Bearer {self.api_key}"] if self.api_key else []
        return "\r\n".join([*lines, f"Content-Length: {len(data)}", "", ""]).encode() + data

    def completion(self, prompt: str | list[int], max_tokens: int, *, closes: bool = False, **fields: object) -> bytes:
        """Return a request for a streamed completion of exactly `max_tokens`."""
        asked = {"model": self.model, "prompt": prompt, "max_tokens": max_tokens, "stream": True, "ignore_eos": True}
        return self.post("/v1/completions", asked | fields, closes=closes)


@dataclass(slots=True)
class Answer:
    """What came of one request: bytes with their times, on the clock of `time.monotonic`.

    Attributes:
        is_whole: HTTP says that nothing is missing.
        problem: Why the connection failed, if it did.
    """

    sent_at: float
    pieces: list[tuple[float, bytes]] = field(default_factory=list)
    is_whole: bool = False
    problem: str | None = None
    ended_at: float = 0.0


class Connection(asyncio.Protocol):
    """One connection; one request at a time.

    Attributes:
        is_open: It can take a request.
    """

    def __init__(self) -> None:
        self._transport: asyncio.Transport
        self._answer: Answer | None = None
        self._done: asyncio.Future[None] | None = None
        self._head = b""
        self._missing: int | None = None
        self._is_chunked = False
        self._tail = b""
        self.is_open = False

    @classmethod
    async def open(cls, address: Address) -> Connection:
        """Connect.

        Raises:
            OSError: The server takes no connection.
        """
        loop = asyncio.get_running_loop()
        context = ssl.create_default_context() if address.is_tls else None
        _, connection = await loop.create_connection(cls, address.host, address.port, ssl=context)
        return connection

    async def ask(self, request: bytes) -> Answer:
        """Send a request and return its answer, whole or not. A cancelled one closes the connection."""
        self._head, self._tail, self._missing, self._is_chunked = b"", b"", None, False
        self._answer = answer = Answer(time.monotonic())
        self._done = asyncio.get_running_loop().create_future()
        if not self.is_open:
            answer.problem = "the connection was closed"
            return answer
        self._transport.write(request)
        try:
            await self._done
        except asyncio.CancelledError:
            self.close()
            raise
        finally:
            self._answer = None
        return answer

    def close(self) -> None:
        """Close it now."""
        self.is_open = False
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast("asyncio.Transport", transport)
        self.is_open = True

    def data_received(self, data: bytes) -> None:
        """Note when data came, and whether the answer has ended."""
        answer = self._answer
        if answer is None:
            self.close()  # unsolicited bytes
            return
        answer.pieces.append((time.monotonic(), data))
        if self._is_chunked:
            self._tail = (self._tail + data)[-16:]
            if self._tail.endswith(_END):
                self._finish(is_whole=True)
        elif self._missing is not None:
            self._count(len(data))
        else:
            self._read_head(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """End the running answer: without a length or chunks, the end of the connection completes it."""
        self.is_open = False
        if self._answer is not None and exc is not None:
            self._answer.problem = str(exc) or type(exc).__name__
        ends_so = b"\r\n\r\n" in self._head and not self._is_chunked and self._missing is None
        self._finish(is_whole=ends_so and exc is None)

    def _read_head(self, data: bytes) -> None:
        self._head += data
        head, end, body = self._head.partition(b"\r\n\r\n")
        if not self._head.startswith(b"HTTP/1."[: len(self._head)]) or (not end and len(head) > _MAX_HEAD):
            self.close()
            return
        if not end:
            return
        head += b"\r\n"
        if _CHUNKED.search(head):
            self._is_chunked, self._tail = True, (b"\r\n" + body)[-16:]
            if self._tail.endswith(_END):
                self._finish(is_whole=True)
        elif (length := _LENGTH.search(head)) is not None:
            self._missing = int(length[1])
            self._count(len(body))

    def _count(self, length: int) -> None:
        assert self._missing is not None
        self._missing -= length
        if self._missing <= 0:
            self._finish(is_whole=True)

    def _finish(self, *, is_whole: bool) -> None:
        answer, done = self._answer, self._done
        if answer is None or done is None or done.done():
            return
        answer.is_whole = is_whole
        answer.ended_at = time.monotonic()
        if self.is_open and _CLOSES.search(self._head.partition(b"\r\n\r\n")[0] + b"\r\n"):
            self.close()
        done.set_result(None)
