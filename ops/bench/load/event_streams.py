"""Clients of event streams: raw HTTP/1.1 on asyncio protocols, so that they cost less than what they measure.

While streams run no JSON is looked at. The texts of a stamping worker carry the time at which they were made: that
gives a token's delay from worker to client.
"""

from __future__ import annotations

import asyncio
import json
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import cast

STAMP_DIGITS = 12
TEXT_MARKER = b'"text":"'
_END = b"\r\n0\r\n\r\n"


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server listens, and what it calls the model."""

    host: str
    port: int
    model: str
    api_key: str = "none"

    def completion(self, prompt: str | list[int], max_tokens: int, *, closes: bool = False, **fields: object) -> bytes:
        """Return a request for a streamed completion of `max_tokens`, after which the server may close."""
        asked = {"model": self.model, "prompt": prompt, "max_tokens": max_tokens, "stream": True}
        body = json.dumps(asked | {"ignore_eos": True} | fields).encode()
        connection = "Connection: close\r\n" if closes else ""
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {self.host}:{self.port}\r\n{connection}"
            f"Authorization: Bearer {self.api_key}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body


def stamp() -> str:
    """Return the monotonic time in µs, in a fixed number of digits."""
    return f"{time.monotonic_ns() // 1000 % 10**STAMP_DIGITS:0{STAMP_DIGITS}d}"


class StreamConnection(asyncio.Protocol, ABC):
    """One connection that makes a request `num_requests` times, the next as soon as the last has ended.

    Attributes:
        num_left: Requests that have not ended.
        sent_at: When the last one was sent, as `time.perf_counter` tells it.
        done: Set when none is left, or the connection is lost.
    """

    def __init__(self, request: bytes, num_requests: int = 1) -> None:
        """Nothing is sent before `send`."""
        self._request = request
        self._tail = b""
        self._transport: asyncio.Transport
        self.num_left = num_requests
        self.sent_at = 0.0
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @abstractmethod
    def note(self, now: float, data: bytes) -> None:
        """Take what has come."""

    def ended(self) -> None:
        """Take the end of an answer."""

    def send(self) -> None:
        """Send the request."""
        self._tail = b""
        self.sent_at = time.perf_counter()
        self._transport.write(self._request)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Note when data came, and whether an answer has ended."""
        self.note(time.perf_counter(), data)
        self._tail = (self._tail + data)[-16:]
        if self._tail.endswith(_END):
            self.num_left -= 1
            self.ended()
            if self.num_left:
                self.send()
            else:
                self.done.set_result(None)
                self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Be done."""
        if not self.done.done():
            self.done.set_result(None)


@dataclass(slots=True)
class Samples:
    """What the connections of one run have seen. Times are seconds."""

    num_requests: int = 0
    num_tokens: int = 0
    num_failures: int = 0
    ttft_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    delays_s: list[float] = field(default_factory=list)


class CountingConnection(StreamConnection):
    """Counts tokens, an event each, and notes when they came."""

    def __init__(self, request: bytes, num_requests: int, samples: Samples) -> None:
        """Add to `samples`."""
        super().__init__(request, num_requests)
        self._samples = samples
        self._last_at = 0.0

    def note(self, now: float, data: bytes) -> None:
        """Count the events that have a text."""
        num_tokens = data.count(TEXT_MARKER)
        if num_tokens:
            samples = self._samples
            samples.num_tokens += num_tokens
            if self._last_at == 0.0:
                samples.ttft_s.append(now - self.sent_at)
            else:
                samples.gaps_s.append(now - self._last_at)
            self._last_at = now
            start = data.index(TEXT_MARKER) + len(TEXT_MARKER)
            digits = data[start : start + STAMP_DIGITS]
            if digits.isdigit() and len(digits) == STAMP_DIGITS:
                samples.delays_s.append((time.monotonic_ns() // 1000 % 10**STAMP_DIGITS - int(digits)) / 1e6)

    def ended(self) -> None:
        """Count the answer; one without a token has failed."""
        self._samples.num_failures += self._last_at == 0.0
        self._samples.num_requests += 1
        self._last_at = 0.0

    def connection_lost(self, exc: Exception | None) -> None:
        """Count what is left as failed."""
        if not self.done.done():
            self._samples.num_failures += self.num_left
        super().connection_lost(exc)


async def count_streams(address: Address, requests: list[bytes], num_rounds: int, spread_s: float = 0.0) -> Samples:
    """Run one connection per request, `num_rounds` times each, their starts spread evenly; return what they saw."""
    samples = Samples()
    loop = asyncio.get_running_loop()
    connections = []
    started = loop.time()
    for index, request in enumerate(requests):
        await asyncio.sleep(max(0.0, started + spread_s * index / len(requests) - loop.time()))
        connection = CountingConnection(request, num_rounds, samples)
        await loop.create_connection(lambda made=connection: made, address.host, address.port)  # type: ignore[misc]
        connection.send()
        connections.append(connection)
    await asyncio.gather(*(connection.done for connection in connections))
    return samples


def percentile_ms(values: list[float], percentile: int) -> float | None:
    """Return a percentile of seconds in milliseconds; None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    return round(ordered[min(len(ordered) - 1, len(ordered) * percentile // 100)] * 1000, 2)
