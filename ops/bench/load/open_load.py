"""Requests that come when they come, over HTTP: what a client sees of a system that it does not wait for."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from ops.bench.load.event_streams import TEXT_MARKER, Address, Answer, Stream
from ops.simulation.workload import Arrival

_EMPTY_TEXT = TEXT_MARKER + b'"'
_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Seen:
    """One answer: when it was asked for, and when each token came. Seconds of one clock."""

    arrival: Arrival
    sent_at: float
    times: list[float]

    @property
    def ttft_s(self) -> float:
        """Time to first token."""
        return self.times[0] - self.sent_at

    @property
    def gaps_s(self) -> list[float]:
        """Times between tokens; 0 for those that came together."""
        return [later - earlier for earlier, later in pairwise(self.times)]


async def serve_arrivals(address: Address, arrivals: Sequence[Arrival], vocabulary: range, seed: int) -> list[Seen]:
    """Send each request at its time, whatever became of those before; return the answers in the order of requests.

    Raises:
        SystemExit: One was refused or broken off.
    """
    draw = random.Random(seed)
    requests = [
        address.completion(draw.choices(vocabulary, k=each.prompt), each.output, closes=True, temperature=0)
        for each in arrivals
    ]
    started = time.monotonic() + 0.05

    async def one(arrival: Arrival, request: bytes) -> Answer:
        await asyncio.sleep(max(0.0, started + arrival.at - time.monotonic()))
        stream = await Stream.connect(address, request)
        stream.send()
        await stream.done
        return stream.answers[0]

    async with asyncio.timeout(_TIMEOUT_S):
        answers = await asyncio.gather(*(one(*pair) for pair in zip(arrivals, requests, strict=True)))
    return [_seen(*pair) for pair in zip(arrivals, answers, strict=True)]


def _seen(arrival: Arrival, answer: Answer) -> Seen:
    times: list[float] = []
    for at, data in answer.pieces:
        times += [at] * (data.count(TEXT_MARKER) - data.count(_EMPTY_TEXT))
    if not answer.is_whole or not times:
        told = b"".join(data for _, data in answer.pieces)[-300:]
        raise SystemExit(f"a request was not answered as a whole: {told!r}")
    return Seen(arrival, answer.sent_at, times)
