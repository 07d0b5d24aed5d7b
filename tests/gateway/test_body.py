"""Bodies, as they come from the network in pieces."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from gateway.body import ClientGoneError, read_body
from gateway.errors import ApiError


def receiver(*pieces: bytes | None, taken: list[int] | None = None) -> Callable[[], Any]:
    """Return an ASGI `receive` that gives the pieces; None is a disconnect."""
    queue = list(pieces)

    async def receive() -> dict[str, Any]:
        if taken is not None:
            taken.append(1)
        piece = queue.pop(0)
        if piece is None:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": piece, "more_body": bool(queue)}

    return receive


async def refused(headers: list[tuple[bytes, bytes]], receive: Callable[[], Any], timeout_s: float = 5.0) -> ApiError:
    with pytest.raises(ApiError) as caught:
        await read_body(headers, receive, 10, timeout_s)
    return caught.value


async def test_pieces_are_joined() -> None:
    assert await read_body([], receiver(b"12345", b"", b"67890"), 10, 5) == b"1234567890"


async def test_body_is_cut_off_at_the_piece_that_exceeds_the_limit() -> None:
    taken: list[int] = []
    error = await refused([], receiver(*[b"1234"] * 100, taken=taken))
    assert (error.status, len(taken)) == (413, 3)


@pytest.mark.parametrize("length", [b"11", b"9" * 30])
async def test_announced_length_is_refused_before_a_byte_is_read(length: bytes) -> None:
    taken: list[int] = []
    error = await refused([(b"content-length", length)], receiver(b"x", taken=taken))
    assert (error.status, taken) == (413, [])


async def test_compressed_body_is_refused() -> None:
    assert (await refused([(b"content-encoding", b"gzip")], receiver(b"x"))).status == 415
    assert await read_body([(b"content-encoding", b"identity")], receiver(b"x"), 10, 5) == b"x"


async def test_client_that_leaves_is_not_answered() -> None:
    with pytest.raises(ClientGoneError):
        await read_body([], receiver(b"123", None), 10, 5)


async def test_body_that_never_comes_is_a_408() -> None:
    async def receive() -> dict[str, Any]:
        await asyncio.sleep(60)
        raise AssertionError

    error = await refused([], receive, timeout_s=0.05)
    assert (error.status, error.type) == (408, "timeout_error")
