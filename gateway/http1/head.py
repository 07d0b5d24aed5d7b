"""The head of a request: from bytes to a value, or to the error that says why not.

llhttp (through httptools) checks the grammar of RFC 9112; what it leaves to servers is checked here: the framing of the
body is unambiguous, `Host` is there once, and everything has a bound. A parser sees exactly one head and no body, so
an upgrade that a client offers cannot change how its body is read.

The id that every answer carries in `x-request-id`, which a client may choose, names a request in every log line. It
identifies nothing: wire requests have ids of our own that no client can guess.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from os import urandom
from typing import NoReturn
from urllib.parse import unquote

import httptools
from msgspec import Struct, field

from gateway.errors import ApiError

MAX_HEAD_BYTES = 32 << 10
MAX_HEADERS = 100
MAX_TARGET_BYTES = 8 << 10
REQUEST_ID = b"x-request-id"

# Characters that are safe in headers, log lines and URLs alike.
_VALID_ID = re.compile(rb"[A-Za-z0-9._:@+=/-]{1,128}")

HeaderList = list[tuple[bytes, bytes]]


class RequestHead(Struct, frozen=True):
    """The head of a request, before its body.

    A struct of msgspec, as `Generation` is, because every request makes one.

    Attributes:
        path: Percent-decoded path, without the query.
        raw_path: The path as sent.
        headers: Names in lower case; values without surrounding blanks.
        keep_alive: Whether the connection may serve another request afterwards; never with HTTP/1.0.
        content_length: Announced length of the body in bytes; 0 without a body, None for a chunked one.
        notes: Values that other modules derive from the headers alone, by key: identical heads come again and again.
    """

    method: str
    path: str
    raw_path: bytes
    query: bytes
    headers: HeaderList
    http_version: str
    keep_alive: bool
    content_length: int | None
    expects_continue: bool
    notes: dict[str, str] = field(default_factory=dict)


def request_id_of(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """Return the id that a client has chosen, or a fresh one where it chose none, several, or one that will not do."""
    chosen = [value for name, value in headers if name == REQUEST_ID]
    is_valid = len(chosen) == 1 and _VALID_ID.fullmatch(chosen[0])
    return chosen[0].decode() if is_valid else "req_" + urandom(12).hex()


def id_header(headers: Iterable[tuple[bytes, bytes]] = ()) -> tuple[bytes, bytes]:
    """Return the header with the request's id for its answer; `headers` are the request's, as far as known."""
    return REQUEST_ID, request_id_of(headers).encode()


def bad_request(message: str) -> ApiError:
    """Return the answer to bytes that are not HTTP/1.1."""
    return ApiError(400, message, code="invalid_http")


def head_too_large() -> ApiError:
    """Return the answer to a head without bounds."""
    return ApiError(431, f"The request's headers exceed {MAX_HEAD_BYTES} bytes.", code="headers_too_large")


class _Collector:
    __slots__ = ("headers", "is_complete", "target")

    def __init__(self) -> None:
        self.target = b""
        self.headers: HeaderList = []
        self.is_complete = False

    def on_url(self, url: bytes) -> None:
        self.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if len(self.headers) >= MAX_HEADERS:
            raise ApiError(431, f"The request has more than {MAX_HEADERS} headers.", code="headers_too_large")
        self.headers.append((name.lower(), value.rstrip(b" \t")))

    def on_headers_complete(self) -> None:
        self.is_complete = True


def parse_head(data: bytes) -> RequestHead:
    """Parse a head, from its request line to the empty line, both included.

    Raises:
        ApiError: 400 for malformed HTTP, 414 for a long target, 431 for too many headers, 501 for a transfer coding
            or a method that is not served, 505 for another version.
    """
    collector = _Collector()
    parser = httptools.HttpRequestParser(collector)
    try:
        parser.feed_data(data)
    except httptools.HttpParserUpgrade:
        # An offer that a server may ignore (RFC 9110, 7.8).
        pass
    except httptools.HttpParserCallbackError as error:
        raise error.__context__ if isinstance(error.__context__, ApiError) else bad_request(str(error)) from None
    except httptools.HttpParserInvalidMethodError:
        raise ApiError(501, "The request's method is unknown.", code="method_not_implemented") from None
    except httptools.HttpParserError as error:
        raise bad_request(f"The request is not valid HTTP: {error}.") from None
    version = parser.get_http_version()
    if version not in ("1.0", "1.1"):
        raise ApiError(505, "Only HTTP/1.1 and HTTP/1.0 are spoken here.", code="http_version_not_supported")
    if not collector.is_complete:
        raise bad_request("The request's head is incomplete.")
    return _build(parser.get_method().decode(), version, collector)


def _build(method: str, version: str, collector: _Collector) -> RequestHead:
    num_hosts = 0
    content_length: int | None = None
    is_chunked = expects_continue = False
    keep_alive = version == "1.1"
    for name, value in collector.headers:
        if name == b"host":
            num_hosts += 1
        elif name == b"content-length":
            content_length = _length(value, content_length, is_chunked)
        elif name == b"transfer-encoding":
            _check_coding(value, version, is_chunked or content_length is not None)
            is_chunked = True
        elif name == b"connection":
            keep_alive = keep_alive and b"close" not in [option.strip() for option in value.lower().split(b",")]
        elif name == b"expect":
            expects_continue = value.lower() == b"100-continue" and version == "1.1"
    if num_hosts > 1 or (num_hosts == 0 and version == "1.1"):
        raise bad_request("A request needs exactly one Host header.")
    raw_path, query = _split_target(method, collector.target)
    return RequestHead(
        method,
        unquote(raw_path.decode("latin-1")) if b"%" in raw_path else raw_path.decode("latin-1"),
        raw_path,
        query,
        collector.headers,
        version,
        keep_alive,
        None if is_chunked else content_length or 0,
        expects_continue,
    )


def _length(value: bytes, earlier: int | None, is_chunked: bool) -> int:
    if earlier is not None or is_chunked:
        _ambiguous()
    # `isdigit` of bytes is true for ASCII digits alone.
    if not value.isdigit() or len(value) > 18:
        raise bad_request("Content-Length must be one decimal number.")
    return int(value)


def _check_coding(value: bytes, version: str, has_framing: bool) -> None:
    if has_framing or version != "1.1":
        _ambiguous()
    if value.lower() != b"chunked":
        message = "The only Transfer-Encoding served is `chunked`."
        raise ApiError(501, message, code="transfer_encoding_not_implemented")


def _ambiguous() -> NoReturn:
    raise bad_request("A body has one framing: one Content-Length, or with HTTP/1.1 one Transfer-Encoding.")


def _split_target(method: str, target: bytes) -> tuple[bytes, bytes]:
    if len(target) > MAX_TARGET_BYTES:
        raise ApiError(414, f"The request's target exceeds {MAX_TARGET_BYTES} bytes.", code="target_too_long")
    if method == "CONNECT":
        raise ApiError(501, "This server is not a proxy.", code="method_not_implemented")
    if b"#" in target:
        raise bad_request("A request's target has no fragment.")
    if not target.startswith(b"/"):
        try:
            url = httptools.parse_url(target)
        except httptools.HttpParserInvalidURLError:
            raise bad_request("The request's target is not a URL.") from None
        return url.path or b"/", url.query or b""
    path, _, query = target.partition(b"?")
    return path, query


MAX_BLANK_BYTES = 64
# Bytes of the last head that an idle connection keeps at most; in memory it takes about three times as much.
MAX_REMEMBERED_BYTES = 1 << 10


class RequestInput:
    """The bytes that one connection has received and not passed on: heads, bodies and pipelined requests.

    Holds `MAX_HEAD_BYTES` at most; the connection stops reading while it is full. Finds the end of a head without
    looking at a byte twice, however slowly it drips in. The last head is remembered in its parsed form, unless it is
    long: a client that keeps its connection mostly sends one head again and again.
    """

    __slots__ = ("_last", "_last_bytes", "_num_blank", "_searched", "data")

    def __init__(self) -> None:
        self.data = bytearray()
        self._searched = 0
        self._num_blank = 0
        self._last_bytes = b""
        self._last: RequestHead | None = None

    @property
    def room(self) -> int:
        """Number of bytes that may still be added."""
        return MAX_HEAD_BYTES - len(self.data)

    @property
    def has_begun_head(self) -> bool:
        """Whether there is a part of a head, if only an empty line before it."""
        return bool(self.data) or self._num_blank > 0

    def clear(self) -> None:
        """Forget everything."""
        self.data = bytearray()
        self._searched = self._num_blank = 0
        self._last_bytes, self._last = b"", None

    def take_head(self) -> RequestHead | None:
        """Remove and return the first head, one object for equal ones in a row; None while it is incomplete."""
        data = self.data
        if data[0] in b"\r\n" and not self._skip_blank():
            return None
        last = self._last
        if last is not None and data.startswith(self._last_bytes):
            self._remove(len(self._last_bytes))
            return last
        if not ord("A") <= data[0] <= ord("Z"):
            raise bad_request("The request does not begin with a method.")
        end = data.find(b"\r\n\r\n", self._searched) + 4
        if end < 4:
            if self.room <= 0:
                raise head_too_large()
            self._searched = max(0, len(data) - 3)
            return None
        return self._parse(self._remove(end))

    def _remove(self, end: int) -> bytes:
        head = bytes(self.data[:end])
        del self.data[:end]
        self._searched = self._num_blank = 0
        return head

    def _parse(self, data: bytes) -> RequestHead:
        head = parse_head(data)
        if len(data) <= MAX_REMEMBERED_BYTES:
            self._last, self._last_bytes = head, data
        return head

    def _skip_blank(self) -> bool:
        """Drop empty lines before a head; return whether something is left."""
        num_blank = len(self.data) - len(self.data.lstrip(b"\r\n"))
        del self.data[:num_blank]
        self._num_blank += num_blank
        if self._num_blank > MAX_BLANK_BYTES:
            raise bad_request("There are too many empty lines before the request.")
        return bool(self.data)
