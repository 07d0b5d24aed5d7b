"""Images fetched from hosts: allowed ones alone, at public addresses, within limits. The hosts speak real TLS."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from gateway.errors import ApiError
from gateway.media import fetch
from gateway.media.fetch import MAX_AT_ONCE_OF_ONE, AllowedHosts, ImageFetcher, is_public
from shared.errors import ConfigError
from tests.certificates import OPENSSL, make_authority, make_named_certificate
from tests.waiting import until

WHERE = "messages.[0].content.[0].image_url"
HOST = "images.test"


def answer(body: bytes, *headers: str, status: str = "200 OK", has_length: bool = True) -> bytes:
    length = [f"Content-Length: {len(body)}"] if has_length else []
    return "\r\n".join([f"HTTP/1.1 {status}", *length, *headers, "", ""]).encode() + body


def answer_in_chunks(last: bytes) -> bytes:
    """Return an answer in two chunks, whose second size line goes on with `last`."""
    return answer(b"1\r\nx\r\n0" + last, "Transfer-Encoding: chunked", has_length=False)


@dataclass
class Host:
    """A host with answers by path."""

    port: int
    context: ssl.SSLContext
    answers: dict[str, bytes] = field(default_factory=dict)
    heads: list[str] = field(default_factory=list)
    may_answer: asyncio.Event = field(default_factory=asyncio.Event)

    def url(self, path: str) -> str:
        return f"https://{HOST}:{self.port}{path}"

    def fetcher(self, max_bytes: int = 1000, **options: Any) -> ImageFetcher:
        hosts = AllowedHosts.read(f"{HOST}:{self.port}")
        options = {"is_allowed": lambda address: address == "127.0.0.1", "tls": self.context, **options}
        return ImageFetcher(hosts, max_bytes, **options)


@pytest.fixture
async def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Host]:
    if OPENSSL is None:
        pytest.skip("needs openssl")
    authority = make_authority(tmp_path)
    own = make_named_certificate(tmp_path, authority, HOST)
    served = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    served.load_cert_chain(own.certificate, own.key)
    client = ssl.create_default_context(cafile=str(authority.certificate))
    host = Host(0, client)
    host.may_answer.set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            host.heads.append(head)
            await host.may_answer.wait()
            writer.write(host.answers.get(head.split()[1], answer(b"", status="404 Not Found")))
            await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=served)
    host.port = server.sockets[0].getsockname()[1]
    resolve = socket.getaddrinfo

    def resolved(name: str, *arguments: Any, **options: Any) -> Any:
        return resolve("127.0.0.1" if name == HOST else name, *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", resolved)
    yield host
    host.may_answer.set()
    server.close()


async def test_image_is_fetched_whole_however_its_host_frames_it(host: Host) -> None:
    host.answers = {
        "/plain?a=b": answer(b"image"),
        "/chunked": answer(b"3\r\nima\r\n2\r\nge\r\n0\r\n\r\n", "Transfer-Encoding: chunked", has_length=False),
        "/closed": answer(b"image", has_length=False),
        "/moved": answer(b"", f"Location: {host.url('/again')}", status="302 Found"),
        "/again": answer(b"", "Location: /chunked", status="308 Permanent Redirect"),
    }
    for path in ("/plain?a=b", "/chunked", "/closed", "/moved"):
        assert await host.fetcher().fetch("t", host.url(path), WHERE) == b"image"
    assert f"Host: {HOST}:{host.port}\r\n" in host.heads[0]
    assert "authorization" not in host.heads[0].lower()


async def test_letters_of_all_languages_are_escaped_as_browsers_do(host: Host) -> None:
    host.answers = {
        "/%C3%B6?q=%E5%9B%B3&r=%20": answer(b"", "Location: /é", status="302 Found"),
        "/%C3%A9": answer(b"image"),
    }
    assert await host.fetcher().fetch("t", host.url("/ö?q=図&r=%20"), WHERE) == b"image"


@pytest.mark.parametrize(
    ("path", "reply", "problem"),
    [
        ("/large", answer(bytes(1001)), "has more than 1000 bytes"),
        ("/said", answer(b"", "Content-Length: 99999999999", has_length=False), "has more than 1000 bytes"),
        ("/endless", answer(bytes(5000), has_length=False), "has more than 1000 bytes"),
        ("/cut", answer(b"ima", "Content-Length: 5", has_length=False), "was cut off"),
        ("/none", answer(b"", status="404 Not Found"), "its host answered 404"),
        ("/packed", answer(b"x", "Content-Encoding: gzip"), "answered with a Content-Encoding"),
        ("/junk", b"\0\0\0\0", "cannot be read"),
        ("/head", b"HTTP/1.1 200 OK\r\nX: " + b"a" * 60_000, "too long a head"),
        ("/loop", answer(b"", "Location: /loop", status="302 Found"), "behind more than 3 redirects"),
        ("/http", answer(b"", f"Location: http://{HOST}/x", status="302 Found"), "must be fetched with https"),
        ("/out", answer(b"", "Location: https://other.test/x", status="302 Found"), "is at 'other.test', from which"),
        ("/port", answer(b"", f"Location: https://{HOST}:22/x", status="302 Found"), f"is at '{HOST}:22', from which"),
        ("/nowhere", answer(b"", "Location: https://[::1", status="302 Found"), "redirects to no valid URL"),
        (
            "/upgrade",
            b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: Upgrade\r\n\r\n",
            "cannot be read",
        ),
        ("/trailers", answer_in_chunks(b"\r\nX: " + b"a" * 60_000), "too long a head"),
        ("/extensions", answer_in_chunks(b";" + b"a" * 60_000 + b"\r\n\r\n"), "too long a head"),
        ("/meta", answer(b"", "Location: https://169.254.169.254/x", status="302 Found"), "is at '169.254.169.254'"),
    ],
)
async def test_what_cannot_be_fetched_says_why(host: Host, path: str, reply: bytes, problem: str) -> None:
    host.answers[path] = reply
    with pytest.raises(ApiError, match=problem) as e:
        await host.fetcher().fetch("t", host.url(path), WHERE)
    assert (e.value.status, e.value.param, e.value.code) == (400, WHERE, "image_not_fetched")


async def test_address_that_is_not_public_is_never_connected_to(host: Host) -> None:
    with pytest.raises(ApiError, match="is at an address that is not public"):
        await host.fetcher(is_allowed=is_public).fetch("t", host.url("/x"), WHERE)
    assert host.heads == []


async def test_name_that_tls_cannot_show_is_refused(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    async def addresses(tenant: str, name: str, port: int) -> list[str]:
        return ["127.0.0.1"]

    name = f"{64 * 'a'}.test:{host.port}"
    fetcher = ImageFetcher(AllowedHosts((name,)), 10, is_allowed=lambda address: True)
    monkeypatch.setattr(fetcher._lookup, "addresses", addresses)
    with pytest.raises(ApiError, match="its host does not answer") as e:
        await fetcher.fetch("t", f"https://{name}/x", WHERE)
    assert e.value.status == 400


async def test_host_with_one_address_that_is_not_public_is_never_connected_to(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def addresses(tenant: str, name: str, port: int) -> list[str]:
        return ["127.0.0.1", "10.0.0.1"]

    fetcher = host.fetcher()
    monkeypatch.setattr(fetcher._lookup, "addresses", addresses)
    with pytest.raises(ApiError, match="is at an address that is not public"):
        await fetcher.fetch("t", host.url("/x"), WHERE)
    assert host.heads == []


async def test_host_without_a_valid_certificate_is_refused(host: Host) -> None:
    with pytest.raises(ApiError, match="its certificate is not valid"):
        await host.fetcher(tls=ssl.create_default_context()).fetch("t", host.url("/x"), WHERE)


async def test_slow_host_is_given_up_and_a_tenant_fetches_a_few_at_once(host: Host) -> None:
    host.may_answer.clear()
    with pytest.raises(ApiError, match=r"could not be fetched within 0.05 s"):
        await host.fetcher(timeout_s=0.05).fetch("t", host.url("/slow"), WHERE)
    fetcher = host.fetcher()
    host.answers["/x"] = answer(b"image")
    waiting = [asyncio.create_task(fetcher.fetch("t", host.url("/x"), WHERE)) for _ in range(MAX_AT_ONCE_OF_ONE)]
    await until(lambda: sum("/x " in head for head in host.heads) == MAX_AT_ONCE_OF_ONE)
    with pytest.raises(ApiError, match="8 images of this tenant are being fetched") as e:
        await fetcher.fetch("t", host.url("/x"), WHERE)
    assert e.value.status == 429
    other = asyncio.create_task(fetcher.fetch("other", host.url("/x"), WHERE))
    host.may_answer.set()
    assert await asyncio.gather(*waiting, other) == [b"image"] * (MAX_AT_ONCE_OF_ONE + 1)


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "10.1.2.3", "192.168.0.1", "172.16.0.1", "169.254.169.254", "0.0.0.0", "100.64.0.1"),
        *("224.0.0.1", "255.255.255.255", "192.0.2.1", "::1", "::", "fe80::1%eth0", "fec0::1", "fc00::1", "ff02::1"),
        *("::ffff:127.0.0.1", "::ffff:10.0.0.1", "64:ff9b::a00:1", "2002:7f00:1::", "::7f00:1", "2001:db8::1"),
    ],
)
def test_addresses_within_are_not_public(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("address", ["8.8.8.8", "1.1.1.1", "2606:4700:4700::1111", "::ffff:8.8.8.8"])
def test_addresses_of_the_internet_are_public(address: str) -> None:
    assert is_public(address)


@pytest.mark.parametrize(
    ("setting", "host", "port", "is_allowed"),
    [
        ("a.test", "a.test", 443, True),
        ("a.test", "b.a.test", 443, False),
        ("a.test", "a.test", 8443, False),
        ("A.test:8443", "a.test", 8443, True),
        ("*.a.test", "b.a.test", 443, True),
        ("*.a.test", "a.test", 443, False),
        ("*.a.test", "eviла.test", 443, False),
        ("*.a.test", "evila.test", 443, False),
        ("*", "any.test", 443, True),
        ("93.184.215.14:8443", "93.184.215.14", 8443, True),
        ("*", "any.test", 22, False),
        (None, "a.test", 443, False),
    ],
)
def test_hosts_are_those_of_the_setting(setting: str | None, host: str, port: int, is_allowed: bool) -> None:
    assert AllowedHosts.read(setting).allow(host, port) is is_allowed


@pytest.mark.parametrize(
    ("setting", "problem"),
    [
        *((each, "is not a host") for each in ("https://a.test", "a.test/x", "a*.test", "user@a.test")),
        *(
            (f"a.test,{each}", "is not at a public address")
            for each in ("localhost", "x.localhost:8443", "127.0.0.1", "10.0.0.1:443", "[::1]", "[::1]:8443")
        ),
    ],
)
def test_setting_that_names_no_host_is_refused(setting: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        AllowedHosts.read(setting)


@pytest.mark.parametrize(
    "url",
    [
        "https://",
        "https://a.test\0.images.test/",
        "https://a b/",
        "https://u@images.test/",
        "https://[::1",
        "https://images.test:99999/",
        "https://é/x",
    ],
)
async def test_urls_that_are_none_are_refused(url: str) -> None:
    fetcher = fetch.ImageFetcher(AllowedHosts(("*",)), 10)
    check: Callable[..., Any] = fetcher.fetch
    with pytest.raises(ApiError) as e:
        await check("t", url, WHERE)
    assert e.value.status == 400


async def test_server_that_fetches_nothing_says_so() -> None:
    with pytest.raises(ApiError, match=r"does not fetch URLs \(--image-hosts\)\. Send its bytes in base64"):
        await ImageFetcher(AllowedHosts(), 10).fetch("t", "https://images.test/x", WHERE)
