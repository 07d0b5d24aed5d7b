"""Requests that come when they come, over HTTP: what a client sees of a system that it does not wait for."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from ops.load_generator.answer import read
from ops.load_generator.connection import Address, Answer, Connection
from ops.simulation.workload import Arrival

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
        connection = await Connection.open(address)
        answer = await connection.ask(request)
        connection.close()
        return answer

    async with asyncio.timeout(_TIMEOUT_S):
        answers = await asyncio.gather(*(one(*pair) for pair in zip(arrivals, requests, strict=True)))
    return [_seen(*pair) for pair in zip(arrivals, answers, strict=True)]


def _seen(arrival: Arrival, answer: Answer) -> Seen:
    reading = read(answer)
    if reading.problem is not None:
        raise SystemExit(f"a request was not answered as a whole: {reading.problem}")
    return Seen(arrival, answer.sent_at, [at for at, _ in reading.texts])
