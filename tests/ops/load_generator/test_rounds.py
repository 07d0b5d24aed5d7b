from __future__ import annotations

import asyncio
import time

from ops.load_generator.answer import Reading
from ops.load_generator.connection import Address
from ops.load_generator.rounds import STAMP_DIGITS, Samples, count_streams, stamp

EVENTS = b'data: {"choices":[{"text":"a"}]}\n\ndata: [DONE]\n\n'


async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Refuse one request and keep the connection open, as gateways do that shed load."""
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 2\r\n\r\n{}")
    await reader.read()
    writer.close()


async def test_refused_request_is_a_failure_and_not_waited_for() -> None:
    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server, asyncio.timeout(10):
        port: int = server.sockets[0].getsockname()[1]
        address = Address("127.0.0.1", port, "demo")
        samples: Samples = await count_streams(address, [address.completion("a", 1)], 1)
    assert samples.num_failures == 1
    assert samples.num_requests == 0


async def answer_twice(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer two requests; with the second answer the connection ends."""
    for lasts in (b"keep-alive", b"close"):
        await reader.readuntil(b"}")
        head = b"HTTP/1.1 200 OK\r\nConnection: %b\r\nContent-Length: %d\r\n\r\n" % (lasts, len(EVENTS))
        writer.write(head + EVENTS)
    await reader.read()
    writer.close()


async def test_rounds_of_a_lost_connection_are_failures_and_starts_are_spread() -> None:
    async with await asyncio.start_server(answer_twice, "127.0.0.1", 0) as server, asyncio.timeout(10):
        address = Address("127.0.0.1", server.sockets[0].getsockname()[1], "demo")
        requests = [address.completion("a", 1)] * 2
        whole = await count_streams(address, requests, 2, spread_s=0.5)
        cut = await count_streams(address, requests, 5)
    assert (whole.num_requests, whole.num_failures, whole.num_tokens) == (4, 0, 4)
    assert whole.elapsed_s >= 0.25
    assert (cut.num_requests, cut.num_failures) == (4, 2 * 3)


def test_samples_have_the_time_to_the_first_text_the_gaps_and_the_delays_of_stamped_texts() -> None:
    made = stamp()
    at = time.monotonic()
    samples = Samples(1.0)
    samples.add(Reading(at - 2.0, at + 1.5, texts=[(at, f"{made} a"), (at + 1.5, "b" * STAMP_DIGITS)]))
    samples.add(Reading(at, at, problem="cut"))
    assert (samples.ttft_s, samples.gaps_s, samples.num_tokens) == ([2.0], [1.5], 2)
    assert (samples.num_requests, samples.num_failures) == (1, 1)
    (delay,) = samples.delays_s
    assert 0 <= delay < 1
