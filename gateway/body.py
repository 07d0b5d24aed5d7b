"""Reading a request's body: counted while it streams in, and not for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from starlette.types import Receive

from gateway.errors import ApiError


class ClientGoneError(Exception):
    """The client left before its request was complete; there is nobody to answer."""


async def read_body(
    headers: Iterable[tuple[bytes, bytes]], receive: Receive, max_bytes: int, timeout_s: float | None
) -> bytes:
    """Return the whole body.

    Args:
        headers: The request's headers; an announced length that is too large is refused before a byte is read.
        receive: The connection's ASGI `receive`.
        max_bytes: Largest body allowed.
        timeout_s: Time the client has; None when the body is known to be here already.

    Raises:
        ApiError: 413 for a body that is too large, 408 for one that comes too slowly, 415 for a compressed one.
        ClientGoneError: The client left.
    """
    for name, value in headers:
        if name == b"content-length" and value.isdigit() and (len(value) > 18 or int(value) > max_bytes):
            raise _too_large(max_bytes)
        if name == b"content-encoding" and value.lower() != b"identity":
            message = "Compressed bodies are not accepted: send the JSON as it is."
            raise ApiError(415, message, code="unsupported_content_encoding")
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(timeout_s):
            while (event := await receive())["type"] == "http.request":
                parts.append(event.get("body", b""))
                size += len(parts[-1])
                if size > max_bytes:
                    raise _too_large(max_bytes)
                if not event.get("more_body", False):
                    return b"".join(parts)
    except TimeoutError:
        raise ApiError(408, f"The body was not complete after {timeout_s:g} s.", code="body_timeout") from None
    raise ClientGoneError


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(413, f"The body is larger than {max_bytes} bytes.", code="request_too_large")
