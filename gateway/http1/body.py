"""A request's body on its way in: counted while it arrives, and taken from the connection only when it is wanted.

Until a handler reads it, a body stays in the connection's input, which is bounded, and beyond that in the kernel.
Handlers ask for a key first, so without one no client makes the gateway hold more than that.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Protocol

from msgspec import Struct

from gateway.errors import ApiError
from gateway.shares import Refusal, Shares


class ClientGoneError(Exception):
    """The client left before its request was complete; no answer can be sent."""


class BodyOwner(Struct, frozen=True):
    """Against whom a body counts while it is on its way in.

    Attributes:
        key_id: The key that was shown; all requests without one share the empty name.
        max_bodies: How many it may have on their way at once; None leaves it to its share of the gateway.
        tenant: In whose turn its bodies are inflated.
    """

    key_id: str = ""
    max_bodies: int | None = None
    tenant: str = ""


class Inflater(Protocol):
    """Inflates bodies of gzip, with a bound for each tenant."""

    async def inflated(self, tenant: str, body: bytes, max_bytes: int) -> bytes:
        """Return the content of a gzip body, as `decompressed` does."""
        ...


WITHOUT_KEY = BodyOwner()
MIN_BYTES_PER_S = 16 << 10
"""A client that sends a streamed body more slowly than that, over all, is given up."""
MIN_BYTES_PER_S_IN_MEMORY = 64 << 10
"""The same for a body that is held in memory until it is whole."""
# Window bits of zlib for a stream with gzip's head.
_GZIP = 16 + zlib.MAX_WBITS
_SMALLER = (
    " Name large images by URL, or by the `file_id` of an upload to /v1/files. "
    "The gateway's operator can raise the limit with --max-body-bytes."
)


class BodyBudget:
    """The bodies that are on their way in, and their bytes. A key that holds many leaves as much for the others."""

    __slots__ = ("bodies", "bytes")

    def __init__(self, max_bytes: int, max_bodies: int) -> None:
        self.bytes = Shares(max_bytes, 1)
        self.bodies = Shares(max_bodies, 1)

    def take_bytes(self, owner: BodyOwner, num: int) -> ApiError | None:
        """Count bytes that have arrived, or return why they are too many."""
        refusal = self.bytes.take(owner.key_id, num)
        return None if refusal is None else _refusal("bytes of request bodies", "too_many_body_bytes", refusal)

    def take_body(self, owner: BodyOwner) -> ApiError | None:
        """Count a body that is waited for, or return why there are too many."""
        limit = owner.max_bodies
        if limit is not None and self.bodies.held(owner.key_id) >= limit:
            message = f"This key may run {limit} sequences at once, and as many of its requests are still on their way."
            return ApiError(429, f"{message} Try again shortly.", code="too_many_bodies", retry_after_s=1.0)
        refusal = self.bodies.take(owner.key_id)
        return None if refusal is None else _refusal("request bodies", "too_many_bodies", refusal)


def _refusal(what: str, code: str, refusal: Refusal) -> ApiError:
    if refusal is Refusal.KEY_HAS_ITS_SHARE:
        message = f"Too many {what} of this key are on their way to this gateway. Try again shortly."
        return ApiError(429, message, code=code, retry_after_s=1.0)
    message = f"Too many {what} are on their way to this gateway. Try again shortly."
    return ApiError(503, message, code=code, retry_after_s=1.0)


class RequestBody:
    """One request's body. The connection writes to it with `feed`, `complete` and `fail`; one handler reads it.

    Attributes:
        is_wanted: Whether the connection should take more bytes: a handler waits for them, or they are to be dropped.
        is_streamed: The handler reads it in pieces, and the connection stands still between them.
        num_taken: Bytes that such a handler has taken so far.
    """

    __slots__ = (
        "_budget",
        "_data",
        "_error",
        "_is_complete",
        "_is_dropped",
        "_max_bytes",
        "_on_wanted",
        "_owner",
        "_waited_s",
        "_waiting",
        "_whole",
        "is_streamed",
        "is_wanted",
        "num_taken",
    )

    def __init__(self, on_wanted: Callable[[], None], budget: BodyBudget) -> None:
        self._on_wanted = on_wanted
        self._budget = budget
        self._owner = WITHOUT_KEY
        self._data = bytearray()
        self._whole = b""
        self._max_bytes = 0
        self._error: Exception | None = None
        self._is_complete = False
        self._is_dropped = False
        self._waiting: asyncio.Future[None] | None = None
        self._waited_s = 0.0
        self.is_wanted = False
        self.is_streamed = False
        self.num_taken = 0

    def __len__(self) -> int:
        return len(self._data)

    async def read(self, max_bytes: int, owner: BodyOwner = WITHOUT_KEY) -> bytes:
        """Return the whole body, once.

        Raises:
            ApiError: 413 for a body that is too large, 408 for one that comes too slowly, 400 for broken framing, 429
                while too many bodies of this owner, or bytes of them, are on their way, 503 while too many of all are.
            ClientGoneError: The client left.
        """
        self._max_bytes = max_bytes
        self._owner = owner
        self.is_wanted = True
        if not self._is_complete and self._error is None:
            self._on_wanted()
        if not self._is_complete and self._error is None:
            await self._wait(owner)
        self.is_wanted = False
        if self._error is not None:
            raise self._take_error()
        if self._whole:
            whole, self._whole = self._whole, b""
            return whole
        data = bytes(self._data)
        self._clear()
        return data

    async def pieces(self, max_bytes: int, owner: BodyOwner = WITHOUT_KEY) -> AsyncIterator[bytes]:
        """Yield the body as it arrives, once; no more than a piece or two of it are held at a time.

        Raises:
            ApiError: As `read`.
            ClientGoneError: The client left.
        """
        self._max_bytes, self._owner, self.is_streamed = max_bytes, owner, True
        loop = asyncio.get_running_loop()
        while True:
            if not self._is_complete and self._error is None:
                self.is_wanted = True
                self._on_wanted()
            if not (self._is_complete or self._error or self._data):
                began = loop.time()
                await self._wait(owner)
                self._waited_s += loop.time() - began
            self.is_wanted = False
            if self._error is not None:
                raise self._take_error()
            piece, self._whole = bytes(self._data) + self._whole, b""
            self._clear()
            self.num_taken += len(piece)
            if self.num_taken > max_bytes:
                raise too_large(max_bytes, is_streamed=True)
            if piece:
                yield piece
            elif self._is_complete:
                return

    def patience_s(self, timeout_s: float) -> float:
        """Return how long to wait for the next piece: `timeout_s` plus the bytes' allowance, less the time waited."""
        return max(0.0, min(timeout_s, timeout_s + self.num_taken / MIN_BYTES_PER_S - self._waited_s))

    @property
    def earned_s(self) -> float:
        """Seconds beyond its timeout that a body may take for the bytes received, unless it is streamed."""
        return 0.0 if self.is_streamed else len(self._data) / MIN_BYTES_PER_S_IN_MEMORY

    def feed(self, piece: bytearray) -> None:
        """Take the received bytes."""
        if self._is_dropped:
            return
        if self.num_taken + len(self._data) + len(piece) > self._max_bytes:
            self.fail(too_large(self._max_bytes, is_streamed=self.is_streamed))
        elif piece:
            refusal = self._budget.take_bytes(self._owner, len(piece))
            if refusal is not None:
                self.fail(refusal)
                return
            self._data += piece
            if self.is_streamed:
                self.is_wanted = False
                self._wake()

    def complete(self, whole: bytes = b"") -> None:
        """Note that everything has arrived; `whole` is a body of which nothing was fed before."""
        self._whole = whole
        self._is_complete = True
        self._wake()

    def fail(self, error: Exception) -> None:
        """Make the reader fail, now or when it comes."""
        if self._error is None and not self._is_complete:
            self._error = error
            self.is_wanted = False
            self._clear()
            self._wake()

    def drop(self) -> None:
        """Forget what there is, and whatever may still come: the request has been answered."""
        self._is_dropped = self.is_wanted = True
        self._clear()

    async def _wait(self, owner: BodyOwner) -> None:
        """Wait for the rest. A body that came together with its head never gets here, and counts against no key."""
        refusal = self._budget.take_body(owner)
        if refusal is not None:
            self.fail(refusal)
            return
        self._waiting = asyncio.get_running_loop().create_future()
        try:
            await self._waiting
        finally:
            self._budget.bodies.give_back(owner.key_id)

    def _clear(self) -> None:
        if self._data:
            self._budget.bytes.give_back(self._owner.key_id, len(self._data))
            self._data = bytearray()

    def _take_error(self) -> Exception:
        # Raised from here it would refer to its reader, whose frame refers to this body, which would keep both.
        error, self._error = self._error, None
        assert error is not None
        return error

    def _wake(self) -> None:
        waiting = self._waiting
        if waiting is not None and not waiting.done():
            waiting.set_result(None)


def check_body_headers(headers: Iterable[tuple[bytes, bytes]], max_bytes: int) -> bool:
    """Return whether a body is compressed; `ApiError` 413 if it is too large, 415 for another compression than gzip."""
    is_compressed = False
    for name, value in headers:
        if name == b"content-length" and int(value) > max_bytes:
            raise too_large(max_bytes)
        if name == b"content-encoding" and value.lower() != b"identity":
            if is_compressed or value.lower() not in (b"gzip", b"x-gzip"):
                message = "The body may be compressed by gzip, once, or not at all."
                raise ApiError(415, message, code="unsupported_content_encoding")
            is_compressed = True
    return is_compressed


def inflated_size(body: bytes, max_bytes: int) -> int:
    """Return the size that a body of gzip claims in its last four bytes, or `max_bytes` if it claims more."""
    return min(int.from_bytes(body[-4:], "little"), max_bytes)


def decompressed(body: bytes, max_bytes: int) -> bytes:
    """Return the content of a gzip body, `inflated_size` bytes at most; `ApiError` 413 if larger, 400 if damaged."""
    size = inflated_size(body, max_bytes)
    inflate = zlib.decompressobj(_GZIP)
    try:
        data = inflate.decompress(body, size + 1)
    except zlib.error:
        raise _broken_gzip() from None
    if len(data) > max_bytes:
        raise too_large(max_bytes)
    if len(data) > size or not inflate.eof or inflate.unused_data:
        raise _broken_gzip()
    return data


def _broken_gzip() -> ApiError:
    message = "The body is not what its header 'content-encoding: gzip' says: one whole gzip stream."
    return ApiError(400, message, code="invalid_content_encoding")


def too_large(max_bytes: int, *, is_streamed: bool = False) -> ApiError:
    """Return the answer to a body that is too large; one that is streamed has a limit of its own."""
    advice = "" if is_streamed else _SMALLER
    return ApiError(413, f"The body is larger than {max_bytes} bytes.{advice}", code="request_too_large")
