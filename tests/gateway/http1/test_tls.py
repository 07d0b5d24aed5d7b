"""The gateway's own TLS, on the loop that it runs on in production."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import uvloop

from gateway.http1.connection_table import ConnectionLimits
from gateway.http1.server import server_tls
from shared.errors import ConfigError
from tests.certificates import OPENSSL, Certificate, make_authority, make_certificate
from tests.gateway.http1.raw_server import REQUEST, Served, Streams, connected, echo, read_head, read_whole, served

pytestmark = pytest.mark.skipif(OPENSSL is None, reason="needs the openssl command to make certificates")


def on_uvloop(test: Callable[[Certificates], Coroutine[Any, Any, None]]) -> Callable[[Certificates], None]:
    """Run a test on the loop that the gateway runs on: its TLS is not asyncio's."""

    def run(certificates: Certificates) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(test(certificates))

    return run


@dataclass(frozen=True)
class Certificates:
    authority: Certificate
    server: Certificate
    client: Certificate


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    directory = tmp_path_factory.mktemp("certificates")
    authority = make_authority(directory)
    server = make_certificate(directory, authority, "server", "127.0.0.1")
    return Certificates(authority, server, make_certificate(directory, authority, "client", "127.0.0.1"))


@contextlib.asynccontextmanager
async def secured(server: Served, certificates: Certificates, *, shows_own: bool = False) -> AsyncIterator[Streams]:
    context = ssl.create_default_context(cafile=certificates.authority.certificate)
    if shows_own:
        context.load_cert_chain(certificates.client.certificate, certificates.client.key)
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port, ssl=context)
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError, ssl.SSLError):
            await writer.wait_closed()


@on_uvloop
async def test_requests_are_answered_over_tls_on_one_connection(certificates: Certificates) -> None:
    tls = server_tls(certificates.server.certificate, certificates.server.key, None)
    async with served(echo, tls=tls) as server, secured(server, certificates) as (reader, writer):
        for _ in range(3):
            writer.write(REQUEST)
            assert await read_whole(reader) == (200, b"hi")
        body = b"x" * 500_000
        head = b"POST /x HTTP/1.1\r\nHost: t\r\nContent-Length: %d\r\n\r\n" % len(body)
        writer.write(head + body)
        assert await read_whole(reader) == (200, body)


@on_uvloop
async def test_broken_request_is_answered_and_the_connection_ends(certificates: Certificates) -> None:
    tls = server_tls(certificates.server.certificate, certificates.server.key, None)
    async with served(echo, tls=tls) as server, secured(server, certificates) as (reader, writer):
        writer.write(b"GET x HTTP/1.1\r\n\r\n")
        assert (await read_head(reader))[0] == 400
        async with asyncio.timeout(5):
            await reader.read()


@on_uvloop
async def test_clear_text_is_not_answered(certificates: Certificates) -> None:
    tls = server_tls(certificates.server.certificate, certificates.server.key, None)
    async with served(echo, tls=tls) as server, connected(server) as (reader, writer):
        writer.write(REQUEST)
        async with asyncio.timeout(5):
            assert b"hi" not in await _rest(reader)


@on_uvloop
async def test_silent_handshake_ends_in_the_time_of_a_head(certificates: Certificates) -> None:
    tls = server_tls(certificates.server.certificate, certificates.server.key, None)
    async with served(echo, ConnectionLimits(head_timeout_s=0.2), tls=tls) as server, connected(server) as (reader, _):
        async with asyncio.timeout(5):
            assert await _rest(reader) == b""


@on_uvloop
async def test_client_without_a_certificate_is_refused_where_one_is_asked_for(certificates: Certificates) -> None:
    tls = server_tls(certificates.server.certificate, certificates.server.key, certificates.authority.certificate)
    async with served(echo, tls=tls) as server:
        async with secured(server, certificates, shows_own=True) as (reader, writer):
            writer.write(REQUEST)
            assert await read_whole(reader) == (200, b"hi")
        with pytest.raises((ssl.SSLError, ConnectionError, asyncio.IncompleteReadError)):
            await _ask_once(server, certificates)


async def _ask_once(server: Served, certificates: Certificates) -> tuple[int, bytes]:
    async with secured(server, certificates) as (reader, writer):
        writer.write(REQUEST)
        return await read_whole(reader)


async def _rest(reader: asyncio.StreamReader) -> bytes:
    with contextlib.suppress(ConnectionError):
        return await reader.read()
    return b""


def test_files_that_do_not_go_together_are_named(certificates: Certificates, tmp_path: Path) -> None:
    server = certificates.server
    assert server_tls(None, None, None) is None
    with pytest.raises(ConfigError, match=r"HEADRACE_TLS_CERT_FILE: is required"):
        server_tls(None, server.key, None)
    with pytest.raises(ConfigError, match=r"HEADRACE_TLS_KEY_FILE: .* is not that of "):
        server_tls(server.certificate, certificates.client.key, None)
    with pytest.raises(ConfigError, match=r"HEADRACE_TLS_CERT_FILE: .*No such file"):
        server_tls(tmp_path / "none.pem", None, None)
    with pytest.raises(ConfigError, match=r"HEADRACE_TLS_CLIENT_CA_FILE: .*no certificates"):
        server_tls(server.certificate, server.key, server.key)
