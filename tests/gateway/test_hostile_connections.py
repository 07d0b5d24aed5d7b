"""What clients did, or could do, to a gateway process through its connections alone. Each test is one incident."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import Iterator

import psutil
import pytest

from tests.gateway.gateway_process import API_KEY, GatewayProcess, running_gateway
from tests.gateway.known_worker import known_worker
from tests.gateway.raw_client import connected
from tests.gateway.wire_worker import WireWorker, expected_text, until

MAX_CONNECTIONS = 24
HEAD_TIMEOUT_S = 1.0
# An attack below sends at least this many bytes, and may cost the gateway at most that many.
ATTACK_BYTES = 48 << 20
MAX_GROWTH_BYTES = 6 << 20

CHUNKED_POST = (
    b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nAuthorization: Bearer %b\r\nTransfer-Encoding: chunked\r\n\r\n"
    % API_KEY.encode()
)
LIVE = b"GET /health/live HTTP/1.1\r\nHost: t\r\n\r\n"


@pytest.fixture(scope="module")
def gateway(nats_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    directory = tmp_path_factory.mktemp("gateway")
    settings = {"max_connections": MAX_CONNECTIONS, "head_timeout_s": HEAD_TIMEOUT_S, "send_timeout_s": 2}
    with running_gateway(directory, nats_url, **settings) as gateway:
        yield gateway


def memory_of(gateway: GatewayProcess) -> int:
    return int(psutil.Process(gateway.process.pid).memory_info().rss)


def flood(gateway: GatewayProcess, opening: bytes, piece: bytes, seconds: float = 10.0) -> bool:
    """Send `opening`, then `piece` again and again without reading; return whether the gateway stopped taking it."""
    deadline = time.monotonic() + seconds
    with socket.create_connection(("127.0.0.1", gateway.port)) as connection:
        connection.settimeout(0.5)
        try:
            connection.sendall(opening)
            for _ in range(ATTACK_BYTES // len(piece) + 1):
                connection.sendall(piece)
                if time.monotonic() > deadline:
                    return False
        except (TimeoutError, ConnectionError):
            return True
    return False


async def is_live(gateway: GatewayProcess) -> bool:
    async with connected(gateway) as client:
        client.writer.write(LIVE)
        async with asyncio.timeout(5):
            return (await client.whole())[0] == 200


@pytest.mark.parametrize(
    ("opening", "piece"),
    [
        (CHUNKED_POST + b"2\r\n{}\r\n0\r\n", b"".join(b"X-%05d: y\r\n" % number for number in range(4096))),
        (CHUNKED_POST + b"2\r\n{}\r\n0\r\nX-Endless: ", b"y" * 65536),
        (CHUNKED_POST + b"2;", b"extension=" * 6554),
        (CHUNKED_POST, b"1;" + b"x" * 200 + b"\r\n \r\n"),
        (b"", b"\r\n" * 32768),
        (b"GET / HTTP/1.1\r\nHost: t\r\n", b"".join(b"X-%05d: y\r\n" % number for number in range(4096))),
        (b"", LIVE * 1000),
        (b"", b"GET /nothing HTTP/1.1\r\nHost: t\r\n\r\n" * 1000),
        (b"", b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Length: 2\r\n\r\n{}" * 1000),
    ],
    ids=[
        "trailers without end",
        "one endless trailer",
        "one endless chunk extension",
        "many chunk extensions",
        "empty lines",
        "headers without end",
        "pipelined health checks, never read",
        "pipelined unknown paths, never read",
        "pipelined keyless requests, never read",
    ],
)
async def test_flood_on_one_connection_costs_no_memory(gateway: GatewayProcess, opening: bytes, piece: bytes) -> None:
    assert await is_live(gateway)
    before = memory_of(gateway)
    flooding = asyncio.create_task(asyncio.to_thread(flood, gateway, opening, piece))
    peak = before
    while not flooding.done():
        peak = max(peak, memory_of(gateway))
        assert await is_live(gateway)
        await asyncio.sleep(0.01)
    assert await flooding, "the gateway took everything"
    assert peak - before < MAX_GROWTH_BYTES
    assert await is_live(gateway)


async def test_memory_of_many_attacked_connections_goes_back(gateway: GatewayProcess) -> None:
    async def attack() -> None:
        async with connected(gateway) as client:
            client.writer.write(CHUNKED_POST + b"ffffff\r\n" + b" " * (2 << 20))
            with contextlib.suppress(ConnectionError):
                await client.writer.drain()
            await asyncio.sleep(0.2)

    async def wave() -> None:
        await asyncio.gather(*(attack() for _ in range(MAX_CONNECTIONS // 2)))
        await until(lambda: num_connections(gateway) == 0)

    await wave()
    after_one = memory_of(gateway)
    for _ in range(4):
        await wave()
    assert memory_of(gateway) - after_one < MAX_GROWTH_BYTES


def num_connections(gateway: GatewayProcess) -> int:
    connections = psutil.Process(gateway.process.pid).net_connections()
    return sum(c.status == psutil.CONN_ESTABLISHED and c.laddr.port == gateway.port for c in connections)


async def test_idle_connections_beyond_the_limit_deny_no_one(gateway: GatewayProcess, worker: WireWorker) -> None:
    async with contextlib.AsyncExitStack() as stack:
        stream = await stack.enter_async_context(connected(gateway))
        stream.post("/v1/completions", {"model": worker.model, "prompt": "a", "stream": True})
        request = await worker.begin(1)
        await stream.head()
        for _ in range(3 * MAX_CONNECTIONS):
            idle = await stack.enter_async_context(connected(gateway))
            idle.writer.write(b"GET / HTTP/1.1\r\n")
        assert await is_live(gateway)
        newcomer = await stack.enter_async_context(connected(gateway))
        newcomer.post("/v1/completions", {"model": worker.model, "prompt": []})
        assert (await newcomer.whole())[0] == 400
        await worker.say(request, 1, 3)
        await worker.end(request, 3)
        chunks = await stream.stream()
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == expected_text(3)


async def test_connections_that_owe_the_rest_of_an_answered_request_deny_no_one(
    gateway: GatewayProcess, worker: WireWorker
) -> None:
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(MAX_CONNECTIONS):
            debtor = await stack.enter_async_context(connected(gateway))
            debtor.writer.write(b"GET /health/live HTTP/1.1\r\nHost: t\r\nContent-Length: 10\r\n\r\n")
            assert (await debtor.whole())[0] == 200
        newcomer = await stack.enter_async_context(connected(gateway))
        newcomer.post("/v1/completions", {"model": worker.model, "prompt": []})
        assert (await newcomer.whole())[0] == 400


async def test_upgrade_to_h2c_with_a_body_is_served_as_http_1(gateway: GatewayProcess, worker: WireWorker) -> None:
    async with connected(gateway) as client:
        for _ in range(2):
            client.post(
                "/v1/completions",
                {"model": "nobody-serves-this", "prompt": "a"},
                "Connection: Upgrade, HTTP2-Settings",
                "Upgrade: h2c",
                "HTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA",
            )
            async with asyncio.timeout(5):
                status, answer = await client.whole()
            assert (status, answer["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize("framing", ["Content-Length: 37748736", "Transfer-Encoding: chunked"])
async def test_refusal_of_a_large_body_arrives_although_the_body_is_still_coming(
    gateway: GatewayProcess, framing: str
) -> None:
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: t\r\nAuthorization: Bearer {API_KEY}\r\nConnection: close\r\n{framing}"
    )
    body = b" " * (36 << 20) if "Length" in framing else b"2400000\r\n" + b" " * (36 << 20) + b"\r\n0\r\n\r\n"

    def post() -> bytes:
        with socket.create_connection(("127.0.0.1", gateway.port), timeout=5) as connection:
            connection.sendall(head.encode() + b"\r\n\r\n" + body)
            answer = b""
            while piece := connection.recv(65536):
                answer += piece
            return answer

    answer = await asyncio.to_thread(post)
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "request_too_large"


async def test_garbage_behind_a_pipelined_post_leaves_its_answer_whole(
    gateway: GatewayProcess, worker: WireWorker
) -> None:
    async with connected(gateway) as client:
        client.post("/v1/completions", {"model": worker.model, "prompt": "a", "stream": True})
        client.writer.write(b"\x16\x03\x01 this is not HTTP\r\n\r\n")
        request = await worker.begin(3)
        await worker.end(request, 3)
        assert (await client.head())[0] == 200
        chunks = await client.stream()
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == expected_text(3)
        status, _ = await client.head()
        assert (status, json.loads(await client.reader.read())["error"]["code"]) == (400, "invalid_http")


async def test_prompts_that_are_refused_are_not_kept(gateway: GatewayProcess, nats_url: str) -> None:
    prompt_bytes, num_prompts = 8 << 20, 12
    async with known_worker(nats_url, gateway) as worker, connected(gateway) as client:
        body = {"model": worker.model, "prompt": "a b " * (prompt_bytes // 4), "max_tokens": 1}
        statuses, sizes = [], []
        for _ in range(num_prompts):
            client.post("/v1/completions", body)
            statuses.append((await client.whole())[0])
            sizes.append(memory_of(gateway))
    assert set(statuses) == {413}
    assert sizes[-1] - sizes[1] < 3 * prompt_bytes, sizes
