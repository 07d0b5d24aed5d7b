"""Fetches images from the hosts that the operator allows, and never from anywhere else.

A host's address is resolved once, checked, and connected to: a name that resolves to something else a moment later
changes nothing. Redirects are followed a few times, and each is checked as the first URL was. TLS proves the host.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import ssl
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from string import punctuation
from urllib.parse import SplitResult, quote, urljoin, urlsplit

import httptools

from gateway.errors import ApiError
from gateway.shares import Turns
from shared.errors import ConfigError
from shared.tenant_bounds import counted

MAX_REDIRECTS = 3
TIMEOUT_S = 10.0
MAX_AT_ONCE = 32
MAX_AT_ONCE_OF_ONE = 8
_MAX_HEAD_BYTES = 32 << 10
_PIECE_BYTES = 64 << 10
_HTTPS = 443
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_ANY = "*"
MAX_LOOKUPS = 16
MAX_LOOKUPS_OF_ONE = 4


class HostLookup:
    """Looks up addresses in threads of its own; used from one event loop.

    A lookup cannot be interrupted: a name server that answers late holds a thread until the system's resolver gives up.
    So a tenant has a few threads at most, they count until their lookups have ended, and tenants that wait take turns.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(MAX_LOOKUPS, "image-hosts")
        self._turns = Turns(MAX_LOOKUPS, MAX_LOOKUPS_OF_ONE)

    async def addresses(self, tenant: str, host: str, port: int) -> list[str]:
        """Return the addresses of a host, when it is the tenant's turn; `OSError` or `UnicodeError` if it has none."""
        await self._turns.take(tenant)
        lookup = asyncio.get_running_loop().run_in_executor(self._pool, _addresses, host, port)
        lookup.add_done_callback(lambda done: self._end(tenant, done))
        # The thread stays taken when the caller gives up.
        return await asyncio.shield(lookup)

    def _end(self, tenant: str, lookup: asyncio.Future[list[str]]) -> None:
        if not lookup.cancelled():
            # Its waiters may be gone.
            lookup.exception()
        self._turns.give_back(tenant)


def _addresses(host: str, port: int) -> list[str]:
    return [str(found[4][0]) for found in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]


@dataclass(frozen=True, slots=True)
class AllowedHosts:
    """The hosts of a setting.

    Attributes:
        hosts: Names in lower case, with a port where it is not 443; `*.` before one stands for what ends with it.
    """

    hosts: tuple[str, ...] = ()

    @classmethod
    def read(cls, setting: str | None) -> AllowedHosts:
        """Return the hosts of a comma-separated setting; `ConfigError` for an invalid or never public one."""
        hosts = tuple(host.strip().lower() for host in (setting or "").split(",") if host.strip())
        for host in hosts:
            if "/" in host or "@" in host or "*" in host.removeprefix("*.").removeprefix(_ANY):
                problem = f"{host!r} is not a host: write images.example.com, *.example.com, example.com:8443 or *"
                raise ConfigError("HEADRACE_IMAGE_HOSTS", problem)
            if not _may_be_public(host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host):
                problem = f"{host!r} is not at a public address: images are never fetched from private ones"
                raise ConfigError("HEADRACE_IMAGE_HOSTS", problem)
        return cls(hosts)

    def allow(self, host: str, port: int) -> bool:
        """Whether images may be fetched from a host at a port."""
        shown = host if port == _HTTPS else f"{host}:{port}"
        for allowed in self.hosts:
            if allowed == shown or (allowed == _ANY and port == _HTTPS):
                return True
            if allowed.startswith("*.") and shown.endswith(allowed[1:]):
                return True
        return False


class FetchError(Exception):
    """An image could not be fetched. The message completes the sentence 'The image at ...'."""


def is_public(address: str) -> bool:
    """Whether an address is one of the public internet, and is not another one in disguise."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(parsed, ipaddress.IPv6Address):
        if parsed.ipv4_mapped is not None:
            return is_public(str(parsed.ipv4_mapped))
        if parsed.sixtofour is not None or parsed.teredo is not None or parsed.is_site_local:
            return False
    # Those of NAT64 are reserved.
    return parsed.is_global and not (parsed.is_multicast or parsed.is_reserved or parsed.is_unspecified)


def _may_be_public(host: str) -> bool:
    try:
        return is_public(host.strip("[]"))
    except ValueError:
        return not f".{host}".endswith(".localhost")


class ImageFetcher:
    """Fetches images over HTTPS from allowed hosts, with a limit of concurrent fetches for each tenant."""

    def __init__(
        self,
        hosts: AllowedHosts,
        max_bytes: int,
        is_allowed: Callable[[str], bool] = is_public,
        tls: ssl.SSLContext | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """Fetch up to `max_bytes` from these hosts, at addresses that `is_allowed` allows."""
        self._hosts = hosts
        self._max_bytes = max_bytes
        self._is_allowed = is_allowed
        self._tls = tls
        self._timeout_s = timeout_s
        self._running: Counter[str] = Counter()
        self._lookup = HostLookup()

    async def fetch(self, tenant: str, url: str, where: str) -> bytes:
        """Return the bytes at a URL; `ApiError` 400 if it may not or cannot be fetched, 429 beyond the limit."""
        own, all_running = self._running[tenant], self._running.total()
        if own >= MAX_AT_ONCE_OF_ONE or all_running >= MAX_AT_ONCE:
            message = f"{own} images of this tenant are being fetched, {all_running} of all. Try again shortly."
            raise ApiError(429, message, param=where, code="too_many_images", retry_after_s=1.0)
        try:
            with counted(self._running, tenant):
                async with asyncio.timeout(self._timeout_s):
                    return await self._follow(tenant, url)
        except FetchError as error:
            raise ApiError(400, f"The image at '{where}' {error}", param=where, code="image_not_fetched") from None
        except TimeoutError:
            message = f"The image at '{where}' could not be fetched within {self._timeout_s:g} s."
            raise ApiError(400, message, param=where, code="image_not_fetched") from None

    async def _follow(self, tenant: str, url: str) -> bytes:
        for _ in range(1 + MAX_REDIRECTS):
            place = self._checked(url)
            answer = await self._get(tenant, place)
            if answer.status in _REDIRECTS and answer.location is not None:
                url = _joined(url, answer.location)
                continue
            if answer.status != 200:
                raise FetchError(f"could not be fetched: its host answered {answer.status}.")
            return bytes(answer.body)
        raise FetchError(f"is behind more than {MAX_REDIRECTS} redirects.")

    def _checked(self, url: str) -> SplitResult:
        try:
            place = urlsplit(url)
            host, port = (place.hostname or "").rstrip("."), place.port or _HTTPS
            host.encode("ascii")
        except ValueError:
            raise FetchError("has no valid URL.") from None
        if place.scheme != "https" or not host or place.username is not None or not url.isprintable() or " " in url:
            raise FetchError("must be fetched with https, from a URL without user, spaces or control characters.")
        if not self._hosts.allow(host, port):
            if not self._hosts.hosts:
                problem = "is a URL, and this server does not fetch URLs (--image-hosts)."
                raise FetchError(f"{problem} Send its bytes in base64.")
            shown = host[:100] if port == _HTTPS else f"{host[:100]}:{port}"
            raise FetchError(f"is at '{shown}', from which this server does not fetch. Send its bytes in base64.")
        return place

    async def _address(self, tenant: str, host: str, port: int) -> str:
        try:
            addresses = await self._lookup.addresses(tenant, host, port)
        except (OSError, UnicodeError):
            raise FetchError("could not be fetched: its host has no address.") from None
        if not addresses or not all(map(self._is_allowed, addresses)):
            raise FetchError("is at an address that is not public.")
        return addresses[0]

    async def _get(self, tenant: str, place: SplitResult) -> _Answer:
        assert place.hostname is not None
        port = place.port or _HTTPS
        address = await self._address(tenant, place.hostname.rstrip("."), port)
        tls = self._tls or ssl.create_default_context()
        answer = _Answer(self._max_bytes)
        try:
            # A name that TLS cannot send fails before there is a connection, which asyncio would leave open.
            place.hostname.encode("idna")
            reader, writer = await asyncio.open_connection(
                address, port, ssl=tls, server_hostname=place.hostname.rstrip("."), limit=_PIECE_BYTES
            )
            try:
                target = quote(f"{place.path or '/'}{'?' + place.query if place.query else ''}", safe=punctuation)
                host = place.hostname if port == _HTTPS else f"{place.hostname}:{port}"
                head = f"GET {target} HTTP/1.1\r\nHost: {host}\r\nUser-Agent: headrace\r\nAccept: image/*\r\n"
                writer.write(f"{head}Accept-Encoding: identity\r\nConnection: close\r\n\r\n".encode())
                parser = httptools.HttpResponseParser(answer)
                while not answer.is_complete and (data := await reader.read(_PIECE_BYTES)):
                    answer.num_received += len(data)
                    parser.feed_data(data)
                    answer.status = parser.get_status_code()
                    # Trailers, and extensions of chunks, too; a chunk's own size is shorter than the chunk.
                    if answer.num_received > _MAX_HEAD_BYTES + 2 * len(answer.body):
                        raise FetchError("could not be fetched: its host's answer has too long a head.")
                if not answer.is_complete and answer.is_bounded:
                    raise FetchError("could not be fetched: its host's answer was cut off.")
                return answer
            finally:
                writer.close()
                with contextlib.suppress(OSError, ssl.SSLError):
                    writer.transport.abort()
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            raise (error.__context__ if isinstance(error.__context__, FetchError) else _unreadable()) from None
        except (OSError, ssl.SSLError, UnicodeError) as error:
            reason = "its certificate is not valid" if isinstance(error, ssl.SSLError) else "its host does not answer"
            raise FetchError(f"could not be fetched: {reason}.") from None


def _joined(url: str, location: str) -> str:
    try:
        return urljoin(url, location)
    except ValueError:
        raise FetchError("could not be fetched: its host redirects to no valid URL.") from None


def _unreadable() -> FetchError:
    return FetchError("could not be fetched: its host's answer cannot be read.")


@dataclass(slots=True)
class _Answer:
    max_bytes: int
    status: int = 0
    location: str | None = None
    body: bytearray = field(default_factory=bytearray)
    has_head: bool = False
    is_complete: bool = False
    is_bounded: bool = False
    num_received: int = 0

    def on_header(self, name: bytes, value: bytes) -> None:
        match name.lower():
            case b"location":
                self.location = value.decode(errors="replace")
            case b"content-length":
                self.is_bounded = True
                if value.isdigit() and int(value) > self.max_bytes:
                    raise self._too_large()
            case b"transfer-encoding":
                self.is_bounded = True
            case b"content-encoding" if value.strip().lower() not in (b"", b"identity"):
                raise FetchError("could not be fetched: its host answered with a Content-Encoding.")

    def on_headers_complete(self) -> None:
        self.has_head = True

    def on_body(self, data: bytes) -> None:
        self.body += data
        if len(self.body) > self.max_bytes:
            raise self._too_large()

    def on_message_complete(self) -> None:
        self.is_complete = True

    def _too_large(self) -> FetchError:
        return FetchError(f"has more than {self.max_bytes} bytes, which is the most that is read.")
