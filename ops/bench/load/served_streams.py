"""Completion streams that begin together, over HTTP, and what they show of a server.

Answers are words of one token each, as `make_model` has them.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from statistics import median

from ops.load_generator.answer import read
from ops.load_generator.connection import Address, Answer, Connection

_TIMEOUT_S = 600.0
# Tokens without text, like the end of a sequence that is ignored, are rare among thousands of words; one answer of a
# hundred tokens may have several.
_LEAST_SHARE_OF_TOKENS = 0.9


class StreamError(Exception):
    """An answer was refused, ended early, or cannot be compared."""


@dataclass(frozen=True, slots=True)
class Served:
    """What a server did with streams that began together.

    Attributes:
        decode_rate: Tokens per second of all, from the last stream's first token to the first stream's last one.
        ttft_p50_s: Median time to the first token.
        ttft_max_s: The longest.
        engine_alone_rate: Decode rate of the server's engine without a server, where that is measured too.
    """

    decode_rate: float
    ttft_p50_s: float
    ttft_max_s: float
    engine_alone_rate: float | None = None

    def others(self) -> dict[str, float]:
        """Return what is recorded of a comparison beside the decode rate."""
        alone = self.engine_alone_rate
        times = {"ttft_p50_ms": round(self.ttft_p50_s * 1e3, 1), "ttft_max_ms": round(self.ttft_max_s * 1e3, 1)}
        return times | ({} if alone is None else {"engine_alone_tokens_per_s": round(alone, 1)})


async def serve_streams(address: Address, prompts: list[list[int]], max_tokens: int) -> Served:
    """Ask for a completion of `max_tokens` of each prompt, all at once.

    Raises:
        StreamError: The server does not listen, an answer is not what was asked for, or streams do not overlap.
    """
    requests = [address.completion(prompt, max_tokens, closes=True, temperature=0) for prompt in prompts]
    try:
        connections = [await Connection.open(address) for _ in requests]
    except OSError as error:
        raise StreamError(f"{address.host}:{address.port} takes no connection: {error.strerror}") from None
    asked = (connection.ask(request) for connection, request in zip(connections, requests, strict=True))
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            answers = await asyncio.gather(*asked)
    except TimeoutError:
        raise StreamError(f"answers took longer than {_TIMEOUT_S:g} s") from None
    finally:
        for connection in connections:
            connection.close()
        await asyncio.sleep(0)
    return measure([(answer.sent_at, token_times(answer, max_tokens)) for answer in answers])


def measure(streams: list[tuple[float, list[float]]]) -> Served:
    """Return what streams show, each of which was asked for at a time and has the times of its tokens.

    Raises:
        StreamError: One ended before the last one began.
    """
    began, ended = max(times[0] for _, times in streams), min(times[-1] for _, times in streams)
    if ended <= began:
        raise StreamError("a stream ended before the last one began; ask for more tokens with --new")
    count = sum(began < moment <= ended for _, times in streams for moment in times)
    waits = [times[0] - sent_at for sent_at, times in streams]
    return Served(count / (ended - began), median(waits), max(waits))


def token_times(answer: Answer, max_tokens: int) -> list[float]:
    """Return when each token's text had arrived.

    Raises:
        StreamError: The answer is an error, or has other than about `max_tokens` tokens.
    """
    reading = read(answer)
    if reading.problem is not None and not reading.texts:
        raise StreamError(reading.problem)
    times = [moment for moment, text in reading.texts for _ in text.split()]
    if not _LEAST_SHARE_OF_TOKENS * max_tokens <= len(times) <= max_tokens:
        raise StreamError(f"an answer has {len(times)} tokens, not {max_tokens}; it ends: {reading.text[-200:]!r}")
    return times
