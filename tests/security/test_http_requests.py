"""Incident classes of HTTP: Host-header bypass, line breaks in headers and logs, compressed bombs, slow clients."""

from __future__ import annotations

import asyncio
import gzip
import json
import time
from collections.abc import AsyncIterator, Iterator

import pytest

from tests.gateway.gateway_process import API_KEY, GatewayProcess, running_gateway
from tests.gateway.known_worker import known_worker
from tests.gateway.raw_client import RawClient, connected
from tests.gateway.wire_worker import until

HEAD_TIMEOUT_S = 1.0
POSTS = ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"]
HOSTS = [
    b"evil.example",
    b"127.0.0.1:1/health/live?",
    b"localhost/metrics",
    b"t\t/health/live",
    b"[::1]/../health",
    b"a@b",
    b"t#/health/live",
]
BREAKS = [
    "x\r\nSet-Cookie: a=b",
    "x\nINFO forged level=info",
    "x\r\n\r\nHTTP/1.1 200 OK",
    "x\u2028y",
    "x\x1b[2Jy",
    "x\x85y",
]


@pytest.fixture(scope="module")
def gateway(nats_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    with running_gateway(tmp_path_factory.mktemp("gateway"), nats_url, head_timeout_s=HEAD_TIMEOUT_S) as gateway:
        yield gateway


@pytest.fixture
async def client(gateway: GatewayProcess) -> AsyncIterator[RawClient]:
    async with connected(gateway) as client:
        yield client


async def answer(client: RawClient, request: bytes) -> tuple[int, bytes]:
    """Send a request and return the status and everything that comes back until the connection rests or ends."""
    client.writer.write(request)
    async with asyncio.timeout(10):
        head = await client.reader.readuntil(b"\r\n\r\n")
    lines = dict(line.split(b": ", 1) for line in head.split(b"\r\n")[1:] if line)
    body = await client.reader.readexactly(int(lines.get(b"content-length", b"0")))
    return int(head.split()[1]), head + body


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/healthz"])
async def test_host_header_opens_no_route(client: RawClient, host: bytes, path: str) -> None:
    """A server that builds its URL from the Host header takes `Host: x/health/live?` for another path."""
    status, whole = await answer(client, b"GET %b HTTP/1.1\r\nHost: %b\r\n\r\n" % (path.encode(), host))
    assert status in (400, 401, 404)
    assert b"data" not in whole
    assert host not in whole


@pytest.mark.parametrize(
    "target", [b"http://evil.example/v1/models", b"//health/live/../../v1/models", b"/health/live/../v1/models"]
)
async def test_target_of_another_form_opens_no_route(client: RawClient, target: bytes) -> None:
    status, _ = await answer(client, b"GET %b HTTP/1.1\r\nHost: t\r\n\r\n" % target)
    assert status in (400, 401, 404)


@pytest.mark.parametrize(
    "name", ["X-Original-URL", "X-Rewrite-URL", "X-Forwarded-Host", "X-HTTP-Method-Override", "Forwarded"]
)
async def test_header_of_a_proxy_changes_neither_route_nor_rights(client: RawClient, name: str) -> None:
    request = f"GET /v1/models HTTP/1.1\r\nHost: t\r\n{name}: /health/live\r\n\r\n"
    assert (await answer(client, request.encode()))[0] == 401


async def test_host_header_causes_no_redirect(client: RawClient) -> None:
    status, whole = await answer(client, b"GET /v1/models/ HTTP/1.1\r\nHost: evil.example\r\n\r\n")
    assert status in (401, 404)
    assert b"ocation" not in whole


@pytest.mark.parametrize("text", BREAKS)
@pytest.mark.parametrize("field", ["model", "user", "stop", "prompt"])
async def test_line_break_of_a_client_forges_neither_header_nor_log_line(
    gateway: GatewayProcess, client: RawClient, field: str, text: str
) -> None:
    before = len(gateway.log)
    body = json.dumps({"model": "m", "prompt": "x", field: text}).encode()
    request = f"POST /v1/completions HTTP/1.1\r\nHost: t\r\nAuthorization: Bearer {API_KEY}\r\n"
    status, whole = await answer(client, f"{request}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    assert status in (400, 404, 503)
    head = whole.partition(b"\r\n\r\n")[0]
    assert b"Set-Cookie" not in head
    assert b"forged" not in head
    for line in gateway.log[before:].split("\n"):
        assert line == "" or line[:2] == "20", line
        assert line.isprintable()


@pytest.mark.parametrize("name", ["x-request-id", "traceparent", "user-agent", "authorization"])
async def test_line_break_within_a_header_is_refused_or_harmless(
    gateway: GatewayProcess, client: RawClient, name: str
) -> None:
    before = len(gateway.log)
    status, whole = await answer(
        client, f"GET /health/live HTTP/1.1\r\nHost: t\r\n{name}: a\nSet-Cookie: b\r\n\r\n".encode()
    )
    assert (status, b"Set-Cookie" in whole) == (400, False)
    assert "Set-Cookie: b" not in gateway.log[before:].split("\n")


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "zstd", "gzip, gzip", "GZIP"])
async def test_compressed_body_is_refused_unread(client: RawClient, path: str, encoding: str) -> None:
    """A kilobyte that unfolds into a gigabyte is never unfolded."""
    bomb = gzip.compress(b"\0" * (4 << 20))
    head = f"POST {path} HTTP/1.1\r\nHost: t\r\nAuthorization: Bearer {API_KEY}\r\nContent-Encoding: {encoding}\r\n"
    status, _ = await answer(client, f"{head}Content-Length: {len(bomb)}\r\n\r\n".encode() + bomb)
    assert status in (400, 415)


async def test_clients_that_send_their_heads_slowly_are_cut_off(gateway: GatewayProcess) -> None:
    async def send_slowly(opening: bytes, piece: bytes) -> None:
        async with connected(gateway) as client:
            client.writer.write(opening)
            started = time.monotonic()
            while not await is_cut_off(client, piece):
                assert time.monotonic() - started < 20 * HEAD_TIMEOUT_S
                await asyncio.sleep(HEAD_TIMEOUT_S / 10)

    line = b"GET /health/live HTTP/1.1\r\n"
    await asyncio.gather(send_slowly(line, b"X"), send_slowly(line, b"X-A: b\r\n"), send_slowly(b"", b"\r\n"))


async def is_cut_off(client: RawClient, piece: bytes) -> bool:
    """Send another piece, and return whether the gateway has closed the connection."""
    try:
        client.writer.write(piece)
        await client.writer.drain()
    except ConnectionError:
        return True
    return client.reader.at_eof()


async def test_gateway_serves_after_all_of_this(gateway: GatewayProcess, nats_url: str) -> None:
    async with known_worker(nats_url, gateway) as worker, connected(gateway) as client:
        client.post("/v1/completions", {"model": worker.model, "prompt": "a", "stream": True})
        request = await worker.begin(2)
        await worker.end(request, 2)
        assert (await client.head())[0] == 200
        await until(lambda: gateway.process.poll() is None)
