"""Thousands of broken requests from a seed, while another client's stream runs on the same gateway.

Every connection must end by itself, everything the gateway says on it must be HTTP, and the stream must not notice.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import time
from collections.abc import Callable, Iterator

import httptools
import psutil
import pytest

from shared.messages import Request
from tests.gateway.gateway_process import API_KEY, GatewayProcess, running_gateway
from tests.gateway.known_worker import known_worker
from tests.gateway.raw_client import RawClient, connected
from tests.gateway.wire_worker import WireWorker, expected_text

_AUTH = f"Authorization: Bearer {API_KEY}\r\n".encode()
_BODY = b'{"model": "nobody-serves-this", "prompt": "a", "stream": true}'
_LENGTH = b"Content-Length: %d\r\n" % len(_BODY)

CORPUS = (
    b"GET /health/live HTTP/1.1\r\nHost: t\r\n\r\n",
    b"GET /v1/models?a=b HTTP/1.1\r\nHost: t\r\n" + _AUTH + b"\r\n",
    b"GET /v1/models HTTP/1.0\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: t\r\n" + _AUTH + _LENGTH + b"\r\n" + _BODY,
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: t\r\n" + _LENGTH + b"Expect: 100-continue\r\n\r\n" + _BODY,
    b"POST /v1/completions HTTP/1.1\r\nHost: t\r\n" + _AUTH + b"Transfer-Encoding: chunked\r\n\r\n"
    b'5;a=b\r\n{"mod\r\n%x\r\n%b\r\n0\r\nX-Trailer: y\r\n\r\n' % (len(_BODY) - 5, _BODY[5:]),
    b"POST /tokenize HTTP/1.1\r\nHost: t\r\n"
    + _AUTH
    + b"Connection: Upgrade\r\nUpgrade: h2c\r\n"
    + _LENGTH
    + b"\r\n"
    + _BODY,
    b"OPTIONS * HTTP/1.1\r\nHost: t\r\nConnection: close\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
)

TOKENS = (
    b"\r\n",
    b"\n",
    b"\r",
    b"\0",
    b" ",
    b"\t",
    b":",
    b";",
    b",",
    b"0",
    b"-1",
    b"ffffffffffffffff",
    b"18446744073709551616",
    b"\xff\xfe",
    b"chunked",
    b"identity",
    b"close",
    b"Content-Length: 5\r\n",
    b"Content-Length: 0\r\n",
    b"Transfer-Encoding: chunked\r\n",
    b"Transfer-Encoding: gzip, chunked\r\n",
    b"Host: u\r\n",
    b" folded\r\n",
    b"X: " + b"y" * 9000 + b"\r\n",
    b"X: y\r\n" * 120,
    b"0\r\n\r\n",
    b"GET /smuggled HTTP/1.1\r\nHost: t\r\n\r\n",
    b"%00%2e%2e/",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc",
)


def _insert(rng: random.Random, data: bytes) -> bytes:
    at = rng.randrange(len(data) + 1)
    return data[:at] + rng.choice(TOKENS) + data[at:]


def _insert_line(rng: random.Random, data: bytes) -> bytes:
    lines = data.split(b"\r\n")
    lines.insert(rng.randrange(len(lines) + 1), rng.choice(TOKENS).rstrip(b"\r\n"))
    return b"\r\n".join(lines)


def _delete(rng: random.Random, data: bytes) -> bytes:
    start = rng.randrange(len(data) + 1)
    return data[:start] + data[start + rng.choice((1, 1, 2, 5, 30)) :]


def _replace(rng: random.Random, data: bytes) -> bytes:
    start = rng.randrange(len(data) + 1)
    return data[:start] + rng.choice(TOKENS) + data[start + rng.randrange(10) :]


def _flip(rng: random.Random, data: bytes) -> bytes:
    if not data:
        return data
    flipped = bytearray(data)
    flipped[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(flipped)


def _repeat(rng: random.Random, data: bytes) -> bytes:
    start = rng.randrange(len(data) + 1)
    return data[:start] + data[start : start + rng.randrange(1, 40)] * rng.randrange(2, 50) + data[start:]


def _truncate(rng: random.Random, data: bytes) -> bytes:
    return data[: rng.randrange(len(data) + 1)]


def _follow(rng: random.Random, data: bytes) -> bytes:
    return data + rng.choice(CORPUS)


def _noise(rng: random.Random, data: bytes) -> bytes:
    return data + rng.randbytes(rng.randrange(1, 200))


_MUTATIONS: tuple[Callable[[random.Random, bytes], bytes], ...] = (
    _insert,
    _insert_line,
    _delete,
    _replace,
    _flip,
    _repeat,
    _truncate,
    _follow,
    _noise,
)


def fuzz_input(rng: random.Random) -> list[bytes]:
    """Return what to send on one connection, in the pieces in which to send it."""
    data = rng.choice(CORPUS)
    for _ in range(rng.choice((0, 1, 1, 1, 2, 3, 6))):
        data = rng.choice(_MUTATIONS)(rng, data)
    cuts = sorted(rng.randrange(len(data) + 1) for _ in range(rng.choice((0, 0, 1, 3))))
    return [data[start:end] for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True)]


NUM_AT_ONCE = 250
TIMEOUT_S = 0.3
TOKEN_INTERVAL_S = 0.01
# The victim's tokens come every 10 ms; a handful of inputs must not stop the gateway for as long as this.
MAX_GAP_S = 1.0
MAX_GROWTH_BYTES = 24 << 20
ANSWERED = {200, 400, 401, 404, 405, 408, 413, 414, 415, 431, 501, 503, 505}


@pytest.fixture(scope="module")
def gateway(nats_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    times = {"head_timeout_s": TIMEOUT_S, "body_timeout_s": TIMEOUT_S, "keep_alive_s": TIMEOUT_S}
    with running_gateway(tmp_path_factory.mktemp("gateway"), nats_url, **times) as gateway:
        yield gateway


class Answers:
    """Checks that what comes on a connection is a series of HTTP answers."""

    def __init__(self) -> None:
        self.statuses: list[int] = []
        self.is_complete = True
        self._parser = httptools.HttpResponseParser(self)

    def on_message_begin(self) -> None:
        self.is_complete = False

    def on_headers_complete(self) -> None:
        self.statuses.append(self._parser.get_status_code())

    def on_message_complete(self) -> None:
        self.is_complete = True

    def feed(self, data: bytes) -> None:
        self._parser.feed_data(data)


async def attack(gateway: GatewayProcess, pieces: list[bytes]) -> list[int]:
    """Send an input, read until the gateway closes, and return the statuses of its answers."""
    answers = Answers()
    async with connected(gateway) as client, asyncio.timeout(20):
        was_reset = False
        try:
            for piece in pieces:
                client.writer.write(piece)
                await asyncio.sleep(0)
            while data := await client.reader.read(65536):
                answers.feed(data)
        except ConnectionError:
            was_reset = True
    assert answers.is_complete or was_reset, pieces
    return [status for status in answers.statuses if status != 100]


async def watch(client: RawClient, gaps: list[float]) -> str:
    """Read the victim's stream to its end; note the gaps between its events."""
    text, last = "", time.monotonic()
    await client.head()
    async for event in client.events():
        now = time.monotonic()
        gaps.append(now - last)
        last = now
        if (found := re.search(r'"text":"(.*?)"', event)) is not None:
            text += found[1]
    return text


async def fuzz(gateway: GatewayProcess, nats_url: str, seed: int, num_inputs: int) -> None:
    rng = random.Random(seed)
    async with known_worker(nats_url, gateway) as worker, connected(gateway) as client:
        client.post("/v1/completions", {"model": worker.model, "prompt": "a", "stream": True})
        request = await worker.begin()
        gaps: list[float] = []
        watching = asyncio.create_task(watch(client, gaps))
        is_over = asyncio.Event()
        speaking = asyncio.create_task(_speak(worker, request, is_over))
        process = psutil.Process(gateway.process.pid)
        statuses: set[int] = set()
        before = 0
        for _ in range(0, num_inputs, NUM_AT_ONCE):
            batch = [attack(gateway, fuzz_input(rng)) for _ in range(NUM_AT_ONCE)]
            for found in await asyncio.gather(*batch):
                statuses.update(found)
            # The first batch warms up what a server allocates once.
            before = before or process.memory_info().rss
        growth = process.memory_info().rss - before
        is_over.set()
        num_tokens, own_pause_s = await speaking
        async with asyncio.timeout(20):
            assert await watching == expected_text(num_tokens)
    assert statuses <= ANSWERED, statuses
    assert statuses >= {200, 400, 401, 404, 408, 431, 501}
    assert max(gaps) < MAX_GAP_S + own_pause_s
    assert growth < MAX_GROWTH_BYTES
    assert "Traceback" not in gateway.log


async def _speak(worker: WireWorker, request: Request, is_over: asyncio.Event) -> tuple[int, float]:
    """Say a token every 10 ms; returns how many were said and how long this process itself once stood still.

    When this process is held up for longer than a worker may be silent, the gateway asks for a worker again, and the
    request goes on from the queue.
    """
    position, longest, last = 0, 0.0, time.monotonic()
    while not is_over.is_set():
        # The queue also delivers it again because this worker does not say that it works on it.
        if not worker.requests.empty() and (again := await worker.next_request()).epoch > request.epoch:
            request, position = again, len(again.emitted)
            await worker.claim(request)
        await worker.say(request, position, position + 1)
        position += 1
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(is_over.wait(), TOKEN_INTERVAL_S)
        now = time.monotonic()
        longest, last = max(longest, now - last), now
    await worker.end(request, position)
    return position, longest


async def test_broken_requests_disturb_no_stream(gateway: GatewayProcess, nats_url: str) -> None:
    await fuzz(gateway, nats_url, seed=11, num_inputs=2_000)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
async def test_many_broken_requests_disturb_no_stream(gateway: GatewayProcess, nats_url: str, seed: int) -> None:
    await fuzz(gateway, nats_url, seed=100 + seed, num_inputs=15_000)
