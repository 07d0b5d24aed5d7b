"""Clients of event streams: raw HTTP/1.1 on asyncio protocols, so that they cost less than what they measure.

While streams run, nothing but the time of each arrival is noted, since the client shares the processor with what it
measures; what came is looked at afterwards. The texts of a stamping worker carry the time at which they were made: that
gives a token's delay from worker to client.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from itertools import pairwise
from typing import cast

STAMP_DIGITS = 12
TEXT_MARKER = b'"text":"'
# In the event that tells why an answer ended, which is no token.
_NO_TEXT = TEXT_MARKER + b'"'
_END = b"\r\n0\r\n\r\n"
_OK = b"HTTP/1.1 200 "


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


@dataclass(slots=True)
class Answer:
    """What came of one request: bytes with their times, on the clock of `time.monotonic`, as the others here."""

    sent_at: float
    pieces: list[tuple[float, bytes]] = field(default_factory=list)
    is_whole: bool = False


class Stream(asyncio.Protocol):
    """One connection that makes a request `num_requests` times, the next as soon as the last has ended.

    Attributes:
        answers: To all requests so far.
        done: Set when none is left, or the connection is lost.
    """

    def __init__(self, request: bytes, num_requests: int = 1) -> None:
        """Nothing is sent before `send`."""
        self._request = request
        self._num_requests = num_requests
        self._tail = b""
        self._transport: asyncio.Transport
        self.answers: list[Answer] = []
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @classmethod
    async def connect(cls, address: Address, request: bytes, num_requests: int = 1) -> Stream:
        """Open the connection."""
        stream = cls(request, num_requests)
        await asyncio.get_running_loop().create_connection(lambda: stream, address.host, address.port)
        return stream

    def send(self) -> None:
        """Send the request."""
        self._tail = b""
        self.answers.append(Answer(time.monotonic()))
        self._transport.write(self._request)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Note when data came, and whether an answer has ended."""
        answer = self.answers[-1]
        answer.pieces.append((time.monotonic(), data))
        if len(answer.pieces) == 1 and not data.startswith(_OK):
            # A refusal has a length, and no last chunk that one could wait for.
            self._transport.close()
            return
        self._tail = (self._tail + data)[-16:]
        if self._tail.endswith(_END):
            answer.is_whole = True
            if len(self.answers) < self._num_requests:
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
    """What the streams of one run have seen. Times are seconds."""

    elapsed_s: float
    num_requests: int = 0
    num_tokens: int = 0
    num_failures: int = 0
    ttft_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    delays_s: list[float] = field(default_factory=list)

    def add(self, answer: Answer) -> None:
        """Count the tokens of an answer, an event with a text each; one that is broken off or has none has failed."""
        texts = [(at, data) for at, data in answer.pieces if TEXT_MARKER in data]
        self.num_requests += answer.is_whole
        self.num_failures += not (answer.is_whole and texts)
        self.num_tokens += sum(data.count(TEXT_MARKER) - data.count(_NO_TEXT) for _, data in texts)
        self.ttft_s += [at - answer.sent_at for at, _ in texts[:1]]
        self.gaps_s += [later - earlier for (earlier, _), (later, _) in pairwise(texts)]
        for at, data in texts:
            start = data.index(TEXT_MARKER) + len(TEXT_MARKER)
            digits = data[start : start + STAMP_DIGITS]
            if digits.isdigit() and len(digits) == STAMP_DIGITS:
                self.delays_s.append((at * 1e6 % 10**STAMP_DIGITS - int(digits)) / 1e6)


async def count_streams(address: Address, requests: list[bytes], num_rounds: int, spread_s: float = 0.0) -> Samples:
    """Run one connection per request, `num_rounds` times each, their starts spread evenly; return what they saw."""
    streams: list[Stream] = []
    started = time.monotonic()
    for index, request in enumerate(requests):
        await asyncio.sleep(max(0.0, started + spread_s * index / len(requests) - time.monotonic()))
        streams.append(await Stream.connect(address, request, num_rounds))
        streams[-1].send()
    await asyncio.gather(*(stream.done for stream in streams))
    samples = Samples(time.monotonic() - started)
    for stream in streams:
        samples.num_failures += num_rounds - len(stream.answers)
        for answer in stream.answers:
            samples.add(answer)
    return samples


def percentile(values: list[float], percent: int) -> float:
    """Return the percentile of at least one value."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, len(ordered) * percent // 100)]
