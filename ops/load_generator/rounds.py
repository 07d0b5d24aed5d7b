"""Connections that each ask the same thing again as soon as it is answered; what they saw is read when all are done."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from ops.load_generator.answer import Reading, read
from ops.load_generator.connection import Address, Answer, Connection

STAMP_DIGITS = 12


def stamp() -> str:
    """Return the monotonic time in µs, in a fixed number of digits, as texts carry the time at which they were made."""
    return f"{time.monotonic_ns() // 1000 % 10**STAMP_DIGITS:0{STAMP_DIGITS}d}"


@dataclass(slots=True)
class Samples:
    """What the streams of one run have seen. Times are seconds; a delay is that of a stamped text."""

    elapsed_s: float
    num_requests: int = 0
    num_tokens: int = 0
    num_failures: int = 0
    ttft_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    delays_s: list[float] = field(default_factory=list)

    def add(self, answer: Answer, reading: Reading) -> None:
        """Count the tokens of an answer, a text each."""
        self.num_failures += reading.problem is not None
        self.num_requests += reading.problem is None
        self.num_tokens += len(reading.texts)
        self.ttft_s += [at - answer.sent_at for at, _ in reading.texts[:1]]
        self.gaps_s += reading.gaps_s
        for at, text in reading.texts:
            digits = text[:STAMP_DIGITS]
            if digits.isdigit() and len(digits) == STAMP_DIGITS:
                self.delays_s.append((at * 1e6 % 10**STAMP_DIGITS - int(digits)) / 1e6)


async def count_streams(address: Address, requests: Sequence[bytes], num_rounds: int, spread_s: float = 0.0) -> Samples:
    """Run one connection per request, `num_rounds` times each, their starts spread evenly; return what they saw."""
    started = time.monotonic()
    tasks = []
    for index, request in enumerate(requests):
        await asyncio.sleep(max(0.0, started + spread_s * index / len(requests) - time.monotonic()))
        connection = await Connection.open(address)
        tasks.append(asyncio.create_task(_ask(connection, request, num_rounds)))
    connections = await asyncio.gather(*tasks)
    samples = Samples(time.monotonic() - started)
    for answers in connections:
        samples.num_failures += num_rounds - len(answers)
        for answer in answers:
            samples.add(answer, read(answer))
    return samples


async def _ask(connection: Connection, request: bytes, num_rounds: int) -> list[Answer]:
    """Return the answers to a request, fewer than `num_rounds` where the connection was lost."""
    answers: list[Answer] = []
    while len(answers) < num_rounds and connection.is_open:
        answers.append(await connection.ask(request))
        if not answers[-1].is_whole:
            break
    if connection.is_open:
        connection.close()
    return answers
