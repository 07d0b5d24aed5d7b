"""A request's body on its way in: counted while it arrives, and taken from the connection only when it is wanted.

Until a handler reads it, a body stays in the connection's input, which is bounded, and beyond that in the kernel.
Handlers ask for a key first, so without one nobody makes the gateway hold more than that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from gateway.errors import ApiError


class ClientGoneError(Exception):
    """The client left before its request was complete; there is nobody to answer."""


class BodyBudget:
    """The bytes of all bodies that are on their way in.

    Attributes:
        max_bytes: How many there may be at once.
        used: How many there are.
    """

    __slots__ = ("max_bytes", "used")

    def __init__(self, max_bytes: int) -> None:
        """Start empty."""
        self.max_bytes = max_bytes
        self.used = 0


class RequestBody:
    """One request's body. The connection writes to it with `feed`, `complete` and `fail`; one handler reads it.

    Attributes:
        is_wanted: Whether the connection should take more bytes: a handler waits for them, or they are to be dropped.
    """

    __slots__ = (
        "_budget",
        "_data",
        "_error",
        "_is_complete",
        "_is_dropped",
        "_max_bytes",
        "_on_wanted",
        "_waiting",
        "is_wanted",
    )

    def __init__(self, on_wanted: Callable[[], None], budget: BodyBudget) -> None:
        """Expect a body; `on_wanted` makes the connection feed what it has, and go on reading."""
        self._on_wanted = on_wanted
        self._budget = budget
        self._data = bytearray()
        self._max_bytes = 0
        self._error: Exception | None = None
        self._is_complete = False
        self._is_dropped = False
        self._waiting: asyncio.Future[None] | None = None
        self.is_wanted = False

    def __len__(self) -> int:
        """Return the number of bytes held."""
        return len(self._data)

    async def read(self, max_bytes: int) -> bytes:
        """Return the whole body, once.

        Raises:
            ApiError: 413 for a body that is too large, 408 for one that comes too slowly, 400 for broken framing, 503
                while too many bytes of bodies are on their way.
            ClientGoneError: The client left.
        """
        self._max_bytes = max_bytes
        self.is_wanted = True
        if not self._is_complete and self._error is None:
            self._on_wanted()
        if not self._is_complete and self._error is None:
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting
        self.is_wanted = False
        if self._error is not None:
            raise self._take_error()
        data = bytes(self._data)
        self._clear()
        return data

    def feed(self, piece: bytearray) -> None:
        """Take what has arrived."""
        if self._is_dropped:
            return
        if len(self._data) + len(piece) > self._max_bytes:
            self.fail(too_large(self._max_bytes))
        elif self._budget.used + len(piece) > self._budget.max_bytes:
            message = "Too many bytes of request bodies are on their way to this gateway. Try again shortly."
            self.fail(ApiError(503, message, code="too_many_body_bytes", retry_after_s=1.0))
        else:
            self._data += piece
            self._budget.used += len(piece)

    def complete(self) -> None:
        """Note that everything has arrived."""
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

    def _clear(self) -> None:
        self._budget.used -= len(self._data)
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


def check_body_headers(headers: Iterable[tuple[bytes, bytes]], max_bytes: int) -> None:
    """Refuse a body by what its headers announce, before a byte of it is read.

    Raises:
        ApiError: 413 for a length that is too large, 415 for a compressed body.
    """
    for name, value in headers:
        if name == b"content-length" and int(value) > max_bytes:
            raise too_large(max_bytes)
        if name == b"content-encoding" and value.lower() != b"identity":
            message = "Compressed bodies are not accepted: send the JSON as it is."
            raise ApiError(415, message, code="unsupported_content_encoding")


def too_large(max_bytes: int) -> ApiError:
    """Return the answer to a body that is too large."""
    return ApiError(413, f"The body is larger than {max_bytes} bytes.", code="request_too_large")
