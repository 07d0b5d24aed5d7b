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

    def add(self, reading: Reading) -> None:
        """Count the tokens of an answer, a text each."""
        self.num_failures += reading.problem is not None
        self.num_requests += reading.problem is None
        self.num_tokens += len(reading.texts)
        self.ttft_s += [reading.ttft_s] if reading.texts else []
        self.gaps_s += reading.gaps_s
        for at, text in reading.texts:
            digits = text[:STAMP_DIGITS]
            if digits.isdigit() and len(digits) == STAMP_DIGITS:
                self.delays_s.append((at * 1e6 % 10**STAMP_DIGITS - int(digits)) / 1e6)


async def count_streams(address: Address, requests: Sequence[bytes], num_rounds: int, spread_s: float = 0.0) -> Samples:
    """Run one connection per request, `num_rounds` times each, their starts spread evenly; return what they saw."""
    started = time.monotonic()
    due = [(spread_s * index / len(requests), request) for index, request in enumerate(requests)]
    connections = await ask_each(address, due, num_rounds)
    samples = Samples(time.monotonic() - started)
    for answers in connections:
        samples.num_failures += num_rounds - len(answers)
        for answer in answers:
            samples.add(read(answer))
    return samples


async def ask_each(
    address: Address, requests: Sequence[tuple[float, bytes]], num_rounds: int = 1
) -> list[list[Answer]]:
    """Ask each request after its seconds, `num_rounds` times in a row, however slow the others are.

    Each has a connection of its own; one that is lost ends its rounds.

    Raises:
        OSError: The server takes no connection.
    """
    started = time.monotonic()

    async def ask(due_s: float, request: bytes) -> list[Answer]:
        await asyncio.sleep(max(0.0, started + due_s - time.monotonic()))
        connection = await Connection.open(address)
        answers: list[Answer] = []
        while len(answers) < num_rounds and connection.is_open:
            answers.append(await connection.ask(request))
        if connection.is_open:
            connection.close()
        return answers

    return await asyncio.gather(*(ask(*each) for each in requests))
