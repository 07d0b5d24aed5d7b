"""Connections to NATS with TLS: never clear text, never a server that is not trusted."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import signal
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from ops.stack.ports import free_port
from shared.errors import DependencyError
from shared.nats_connection import connect
from shared.nats_files import NatsFiles
from tests.certificates import OPENSSL, Certificate, make_authority, make_certificate
from tests.ops.cli.command import headrace
from tests.servers import NatsServer
from tests.waiting import until

needs_openssl = pytest.mark.skipif(OPENSSL is None, reason="needs the openssl command to make certificates")


class ClearTextServer:
    """Says of itself what a NATS server without TLS says, and keeps what clients send."""

    def __init__(self, **info: object) -> None:
        self.received = b""
        self.connections = 0
        self.writers: list[asyncio.StreamWriter] = []
        self._info = {"server_id": "x", "version": "2.15.1", "max_payload": 1 << 20, "auth_required": True} | info

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.writers.append(writer)
        writer.write(b"INFO " + json.dumps(self._info).encode() + b"\r\n")
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(4096):
                self.received += data

    async def close(self) -> None:
        for writer in self.writers:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()


@contextlib.asynccontextmanager
async def clear_text_server(port: int = 0, **info: object) -> AsyncIterator[tuple[ClearTextServer, str]]:
    fake = ClearTextServer(**info)
    server = await asyncio.start_server(fake.serve, "127.0.0.1", port)
    yield fake, f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    server.close()
    await fake.close()


@dataclasses.dataclass
class Authorities:
    """An authority that the server's certificate is from, another one, and a client's certificate of the first."""

    trusted: Certificate
    other: Certificate
    server: Certificate
    misnamed: Certificate
    client: Certificate


@pytest.fixture(scope="module")
def authorities(tmp_path_factory: pytest.TempPathFactory) -> Authorities:
    directory = tmp_path_factory.mktemp("certificates")
    trusted = make_authority(directory)
    return Authorities(
        trusted,
        make_authority(directory, "other"),
        make_certificate(directory, trusted, "server", "127.0.0.1"),
        make_certificate(directory, trusted, "misnamed", "127.0.0.2"),
        make_certificate(directory, trusted, "client", "127.0.0.3"),
    )


def _tls_server(start: Callable[..., NatsServer], certificate: Certificate, *more: str) -> tuple[NatsServer, str]:
    server = start("--tls", "--tlscert", str(certificate.certificate), "--tlskey", str(certificate.key), *more)
    return server, server.url.replace("nats://", "tls://")


@pytest.mark.parametrize("info", [{}, {"tls_required": False}, {"tls_available": True}])
async def test_server_without_tls_is_sent_nothing(info: dict[str, object]) -> None:
    async with clear_text_server(**info) as (fake, place):
        started = time.monotonic()
        with pytest.raises(DependencyError, match="does not offer TLS") as raised:
            await connect(f"tls://u:secret@{place}", role="worker", name="w")
        assert time.monotonic() - started < 5
        assert "secret" not in str(raised.value)
        assert (fake.connections > 0, fake.received) == (True, b"")


@needs_openssl
async def test_certificate_settings_require_tls_whatever_the_scheme(authorities: Authorities) -> None:
    client = authorities.client
    for files in (
        NatsFiles(nats_ca_file=authorities.trusted.certificate),
        NatsFiles(nats_cert_file=client.certificate, nats_key_file=client.key),
    ):
        async with clear_text_server() as (fake, place):
            with pytest.raises(DependencyError, match="does not offer TLS"):
                await connect(f"nats://{place}", role="worker", name="w", user="u", password="secret", files=files)
            assert fake.received == b""


async def test_one_tls_url_among_several_requires_tls_of_all() -> None:
    async with clear_text_server() as (fake, place):
        with pytest.raises(DependencyError, match="does not offer TLS"):
            await connect(f"nats://u:secret@{place},tls://u:secret@{place}", role="worker", name="w")
        assert fake.received == b""


@needs_openssl
async def test_trusted_server_is_used(start_nats: Callable[..., NatsServer], authorities: Authorities) -> None:
    _, url = _tls_server(start_nats, authorities.server)
    client = await connect(url, role="worker", name="w", files=NatsFiles(nats_ca_file=authorities.trusted.certificate))
    assert await client.jetstream().account_info()
    await client.close()


@needs_openssl
async def test_server_that_ends_a_connection_is_no_warning_of_python_s(
    start_nats: Callable[..., NatsServer], authorities: Authorities, caplog: pytest.LogCaptureFixture
) -> None:
    server, url = _tls_server(start_nats, authorities.server)
    files = NatsFiles(nats_ca_file=authorities.trusted.certificate)
    client = await connect(url, role="worker", name="w", files=files)
    # Other than when it is killed, the server ends TLS before the connection.
    server.process.send_signal(signal.SIGTERM)
    await until(lambda: not client.is_connected)
    await client.close()
    assert "eof_received" not in caplog.text


@needs_openssl
async def test_clear_text_url_of_a_server_that_is_not_trusted_is_refused_and_does_not_hang(
    start_nats: Callable[..., NatsServer], authorities: Authorities
) -> None:
    _, url = _tls_server(start_nats, authorities.server)
    async with asyncio.timeout(10):
        with pytest.raises(DependencyError, match=r"is not trusted \(.*check HEADRACE_NATS_CA_FILE"):
            await connect(url.replace("tls://", "nats://"), role="worker", name="w")


@needs_openssl
async def test_server_whose_certificate_has_expired_is_told_from_one_of_another_authority(
    start_nats: Callable[..., NatsServer], authorities: Authorities, tmp_path: Path
) -> None:
    _, url = _tls_server(start_nats, make_certificate(tmp_path, authorities.trusted, "old", "127.0.0.1", days=-1))
    with pytest.raises(DependencyError, match=r"is not trusted \(certificate has expired\): renew its certificate, or"):
        await connect(url, role="worker", name="w", files=NatsFiles(nats_ca_file=authorities.trusted.certificate))


@needs_openssl
async def test_server_that_falls_back_to_clear_text_after_a_restart_is_not_reconnected_to(
    start_nats: Callable[..., NatsServer], authorities: Authorities
) -> None:
    server, url = _tls_server(start_nats, authorities.server)
    files = NatsFiles(nats_ca_file=authorities.trusted.certificate)
    errors: list[Exception] = []

    async def note(error: Exception) -> None:
        errors.append(error)

    client = await connect(url, role="worker", name="w", user="u", password="secret", files=files, on_error=note)
    server.kill()
    async with clear_text_server() as (named, other), clear_text_server(server.port, connect_urls=[other]) as (fake, _):
        await until(lambda: sum("does not offer TLS" in str(error) for error in errors) > 1)
        # What waits for a connection must not leave with the last words of a client that is closed.
        await client.publish("hr.req.m.interactive", b"a secret prompt")
        async with asyncio.timeout(5):
            await client.close()
        assert (client.is_connected, fake.connections > 0, fake.received) == (False, True, b"")
        assert named.connections == 0


@needs_openssl
@pytest.mark.parametrize("problem", ["unknown authority", "another host"])
async def test_server_that_is_not_trusted_is_refused_in_one_line(
    start_nats: Callable[..., NatsServer], authorities: Authorities, problem: str
) -> None:
    is_unknown = problem == "unknown authority"
    server, url = _tls_server(start_nats, authorities.server if is_unknown else authorities.misnamed)
    ca = (authorities.other if is_unknown else authorities.trusted).certificate
    with pytest.raises(DependencyError, match=r"is not trusted \(.*check HEADRACE_NATS_CA_FILE") as raised:
        await connect(url, role="worker", name="w", files=NatsFiles(nats_ca_file=ca))
    assert "\n" not in str(raised.value)
    assert "CONNECT" not in server.log


@needs_openssl
async def test_server_that_asks_for_our_certificate_gets_it(
    start_nats: Callable[..., NatsServer], authorities: Authorities
) -> None:
    trusted = authorities.trusted.certificate
    _, url = _tls_server(start_nats, authorities.server, "--tlsverify", "--tlscacert", str(trusted))
    ours = NatsFiles(
        nats_ca_file=trusted,
        nats_cert_file=authorities.client.certificate,
        nats_key_file=authorities.client.key,
    )
    client = await connect(url, role="worker", name="w", files=ours)
    await client.close()
    with pytest.raises(DependencyError):
        await connect(url, role="worker", name="w", files=NatsFiles(nats_ca_file=trusted), timeout_s=1)


@needs_openssl
def test_unusable_files_are_one_line_each(tmp_path: Path, authorities: Authorities) -> None:
    junk = tmp_path / "junk"
    junk.write_bytes(b"\xff not a certificate")
    missing = str(tmp_path / "missing")
    good = str(authorities.client.certificate)
    url = f"tls://127.0.0.1:{free_port()}"
    for options, problem in [
        (["--nats-ca-file", missing], "--nats-ca-file: "),
        (["--nats-ca-file", str(junk)], "holds no certificates in PEM form"),
        (["--nats-cert-file", missing], "--nats-cert-file: "),
        (["--nats-cert-file", good], "--nats-key-file: "),
        (["--nats-cert-file", good, "--nats-key-file", missing], "--nats-key-file: "),
        (["--nats-cert-file", good, "--nats-key-file", str(authorities.server.key)], "--nats-key-file: the key in "),
        (["--nats-key-file", str(authorities.client.key)], "needs --nats-cert-file beside it"),
    ]:
        done = headrace("setup", "--nats-url", url, "--timeout-s", "0.5", *options)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
        assert problem in done.stderr
