"""A load generator for event streams: raw HTTP/1.1 on asyncio protocols, so that it costs less than what it measures.

Each connection repeats one request, the next as soon as the last has ended. It counts events and looks at no JSON. The
texts of a stamping worker carry the time at which they were made: that gives a token's delay from worker to client.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from functools import partial
from typing import cast

STAMP_DIGITS = 12
_END = b"\r\n0\r\n\r\n"


def stamp() -> str:
    """Return the monotonic time in µs, in a fixed number of digits."""
    return f"{time.monotonic_ns() // 1000 % 10**STAMP_DIGITS:0{STAMP_DIGITS}d}"


@dataclass(slots=True)
class Samples:
    """What the connections of one run have seen. Times are seconds."""

    num_requests: int = 0
    num_tokens: int = 0
    num_failures: int = 0
    ttft_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    delays_s: list[float] = field(default_factory=list)


class StreamConnection(asyncio.Protocol):
    """One connection that makes `num_requests` requests, one after the other."""

    def __init__(self, request: bytes, num_requests: int, samples: Samples, marker: bytes) -> None:
        """`marker` occurs once in each event that has a token, directly before its text."""
        self._request = request
        self._left = num_requests
        self._samples = samples
        self._marker = marker
        self._tail = b""
        self._sent_at = 0.0
        self._last_at = 0.0
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the first request."""
        self._transport = cast("asyncio.Transport", transport)
        self._send()

    def data_received(self, data: bytes) -> None:
        """Count tokens and note when they came."""
        now = time.perf_counter()
        samples = self._samples
        num_tokens = data.count(self._marker)
        if num_tokens:
            samples.num_tokens += num_tokens
            if self._last_at == 0.0:
                samples.ttft_s.append(now - self._sent_at)
            else:
                samples.gaps_s.append(now - self._last_at)
            self._last_at = now
            self._note_delay(data)
        self._tail = (self._tail + data)[-16:]
        if self._tail.endswith(_END):
            self._end()

    def connection_lost(self, exc: Exception | None) -> None:
        """Count what is left as failed."""
        if not self.done.done():
            self._samples.num_failures += self._left
            self.done.set_result(None)

    def _send(self) -> None:
        self._last_at = 0.0
        self._tail = b""
        self._sent_at = time.perf_counter()
        self._transport.write(self._request)

    def _note_delay(self, data: bytes) -> None:
        start = data.index(self._marker) + len(self._marker)
        digits = data[start : start + STAMP_DIGITS]
        if digits.isdigit() and len(digits) == STAMP_DIGITS:
            made_us = int(digits)
            self._samples.delays_s.append((time.monotonic_ns() // 1000 % 10**STAMP_DIGITS - made_us) / 1e6)

    def _end(self) -> None:
        if self._last_at == 0.0:
            self._samples.num_failures += 1
        self._samples.num_requests += 1
        self._left -= 1
        if self._left:
            self._send()
        else:
            self.done.set_result(None)
            self._transport.close()


async def run_streams(
    host: str, port: int, requests: list[bytes], num_rounds: int, marker: bytes, spread_s: float = 0.0
) -> Samples:
    """Run one connection per request, `num_rounds` times each, their starts spread evenly; return what they saw."""
    samples = Samples()
    loop = asyncio.get_running_loop()
    connections = []
    started = loop.time()
    for index, request in enumerate(requests):
        await asyncio.sleep(max(0.0, started + spread_s * index / len(requests) - loop.time()))
        make = partial(StreamConnection, request, num_rounds, samples, marker)
        _, connection = await loop.create_connection(make, host, port)
        connections.append(connection)
    await asyncio.gather(*(connection.done for connection in connections))
    return samples
