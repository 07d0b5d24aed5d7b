"""Bodies, as they come from a connection in pieces."""

from __future__ import annotations

import asyncio
import gzip
import tracemalloc

import pytest

from gateway.errors import ApiError
from gateway.http1.body import (
    MIN_BYTES_PER_S,
    BodyBudget,
    BodyOwner,
    ClientGoneError,
    RequestBody,
    check_body_headers,
    decompressed,
    inflated_size,
)

# The processes of a run have to name the same tests: without the time of day.
GZIPPED = gzip.compress(b"x", mtime=0)


class Source:
    """A connection with these pieces to give; it gives them while they are wanted."""

    def __init__(self, *pieces: bytes, is_complete: bool = True, budget: BodyBudget | None = None) -> None:
        self.pieces = list(pieces)
        self.is_complete = is_complete
        self.body = RequestBody(self.give, budget or BodyBudget(1 << 20, 10))

    def give(self) -> None:
        while self.body.is_wanted and self.pieces:
            self.body.feed(bytearray(self.pieces.pop(0)))
        if self.is_complete and not self.pieces:
            self.body.complete()


async def test_pieces_are_joined() -> None:
    assert await Source(b"12345", b"", b"67890").body.read(10) == b"1234567890"


async def test_body_that_comes_whole_is_given_once_and_counted_against_no_key() -> None:
    budget = BodyBudget(1, 0)
    body = RequestBody(lambda: body.complete(b"12345"), budget)
    assert await body.read(10) == b"12345"
    assert await body.read(10) == b""
    assert (budget.bytes.used, budget.bodies.used) == (0, 0)


async def test_pieces_that_come_later_are_waited_for() -> None:
    source = Source(b"123", is_complete=False)
    reading = asyncio.create_task(source.body.read(10))
    await asyncio.sleep(0)
    source.pieces.append(b"45")
    source.is_complete = True
    source.give()
    assert await reading == b"12345"


async def test_bytes_and_places_of_a_body_are_those_of_its_key_and_given_back_to_it() -> None:
    budget = BodyBudget(1 << 20, 10)
    source = Source(b"123", is_complete=False, budget=budget)
    reading = asyncio.create_task(source.body.read(10, BodyOwner("key")))
    await asyncio.sleep(0)
    assert (budget.bytes.held("key"), budget.bodies.held("key")) == (3, 1)
    source.is_complete = True
    source.give()
    await reading
    assert (budget.bytes.held("key"), budget.bodies.held("key")) == (0, 0)
    assert (budget.bytes.used, budget.bodies.used) == (0, 0)


async def test_nothing_is_taken_before_it_is_read() -> None:
    source = Source(b"12345")
    assert not source.body.is_wanted
    assert source.pieces == [b"12345"]


async def test_body_is_cut_off_at_the_piece_that_exceeds_the_limit() -> None:
    source = Source(*[b"1234"] * 100)
    with pytest.raises(ApiError) as caught:
        await source.body.read(10)
    assert (caught.value.status, len(source.pieces), len(source.body)) == (413, 97, 0)
    assert caught.value.code == "request_too_large"


async def test_rest_of_an_answered_body_is_dropped() -> None:
    source = Source(b"12345", b"67890")
    source.body.drop()
    source.give()
    assert (source.pieces, len(source.body)) == ([], 0)


async def test_failure_reaches_the_reader_that_waits_and_the_one_that_comes_later() -> None:
    waiting, later = (RequestBody(lambda: None, BodyBudget(1 << 20, 10)) for _ in range(2))
    reading = asyncio.create_task(waiting.read(10))
    await asyncio.sleep(0)
    for body in (waiting, later):
        body.fail(ClientGoneError())
    with pytest.raises(ClientGoneError):
        await reading
    with pytest.raises(ClientGoneError):
        await later.read(10)


async def test_a_body_that_is_too_large_is_refused_by_its_length_or_bytes_with_what_to_do_about_it() -> None:
    check_body_headers([(b"content-length", b"10")], 10)
    with pytest.raises(ApiError) as announced:
        check_body_headers([(b"content-length", b"11")], 10)
    body = RequestBody(lambda: None, BodyBudget(1 << 20, 10))
    reading = asyncio.create_task(body.read(10))
    await asyncio.sleep(0)
    body.feed(bytearray(11))
    with pytest.raises(ApiError) as arrived:
        await reading
    for error in (announced.value, arrived.value):
        assert (error.status, error.code) == (413, "request_too_large")
        assert "larger than 10 bytes. Name large images by URL" in error.message
        assert "`file_id`" in error.message
        assert "--max-body-bytes" in error.message


@pytest.mark.parametrize("encodings", [[b"br"], [b"deflate"], [b"gzip, gzip"], [b"gzip", b"gzip"], [b""]])
def test_compression_other_than_gzip_is_refused(encodings: list[bytes]) -> None:
    assert not check_body_headers([(b"content-encoding", b"identity")], 10)
    assert check_body_headers([(b"content-encoding", b"GZIP")], 10)
    with pytest.raises(ApiError) as caught:
        check_body_headers([(b"content-encoding", encoding) for encoding in encodings], 10)
    assert (caught.value.status, caught.value.code) == (415, "unsupported_content_encoding")


def test_compressed_body_is_read_up_to_the_bound_and_never_beyond() -> None:
    assert decompressed(gzip.compress(b"x" * 1000), 1000) == b"x" * 1000
    bomb = gzip.compress(b"\0" * (64 << 20))
    tracemalloc.start()
    try:
        with pytest.raises(ApiError) as caught:
            decompressed(bomb, 1000)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert caught.value.status == 413


def test_body_that_is_larger_than_it_claims_is_refused_once_it_is_larger() -> None:
    claims_less = gzip.compress(b"x" * (1 << 20))[:-4] + (1000).to_bytes(4, "little")
    assert inflated_size(claims_less, 4 << 20) == 1000
    tracemalloc.start()
    try:
        with pytest.raises(ApiError) as caught:
            decompressed(claims_less, 4 << 20)
        assert tracemalloc.get_traced_memory()[1] < 64 << 10
    finally:
        tracemalloc.stop()
    assert (caught.value.status, caught.value.code) == (400, "invalid_content_encoding")


def test_body_that_claims_more_than_is_allowed_counts_as_what_is_allowed() -> None:
    assert inflated_size(gzip.compress(b"x" * 1001), 1000) == 1000


@pytest.mark.parametrize("body", [b"", b"{}", GZIPPED[:-1], GZIPPED + b"y", GZIPPED * 2])
def test_damaged_compression_is_refused(body: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        decompressed(body, 1000)
    assert (caught.value.status, caught.value.code) == (400, "invalid_content_encoding")


async def test_bodies_share_a_budget_and_give_back_what_they_used() -> None:
    budget = BodyBudget(10, 10)
    first = Source(b"12345678", is_complete=False, budget=budget)
    reading = asyncio.create_task(first.body.read(100))
    await asyncio.sleep(0)
    assert budget.bytes.used == 8
    with pytest.raises(ApiError) as caught:
        await Source(b"123", budget=budget).body.read(100)
    assert (caught.value.status, caught.value.code, budget.bytes.used) == (503, "too_many_body_bytes", 8)
    first.body.complete()
    await reading
    assert budget.bytes.used == 0
    assert await Source(b"123", budget=budget).body.read(100) == b"123"


async def test_body_of_a_client_that_leaves_gives_back_what_it_used() -> None:
    budget = BodyBudget(10, 10)
    source = Source(b"12345678", is_complete=False, budget=budget)
    reading = asyncio.create_task(source.body.read(100))
    await asyncio.sleep(0)
    source.body.fail(ClientGoneError())
    with pytest.raises(ClientGoneError):
        await reading
    assert budget.bytes.used == 0


async def test_bodies_that_are_waited_for_are_counted_until_they_are_here() -> None:
    budget = BodyBudget(1 << 20, 1)
    first = Source(b"123", is_complete=False, budget=budget)
    reading = asyncio.create_task(first.body.read(10))
    await asyncio.sleep(0)
    with pytest.raises(ApiError) as caught:
        await Source(b"123", is_complete=False, budget=budget).body.read(10)
    error = caught.value
    assert (error.status, error.code, error.retry_after_s) == (503, "too_many_bodies", 1.0)
    # One that is here already needs no place.
    assert await Source(b"123", budget=budget).body.read(10) == b"123"
    first.body.complete()
    assert await reading == b"123"
    assert budget.bodies.used == 0


async def test_streamed_body_holds_one_piece_at_a_time_and_gives_it_back() -> None:
    budget = BodyBudget(8, 10)
    owner = BodyOwner("key")
    source = Source(b"12345", b"", b"67890", b"abc", budget=budget)
    taken = []
    async for piece in source.body.pieces(20, owner):
        # Without a reader that waits, the connection takes nothing more.
        assert not source.body.is_wanted
        assert budget.bytes.used == 0
        taken.append((piece, len(source.pieces)))
    assert taken == [(b"12345", 3), (b"67890", 1), (b"abc", 0)]
    assert source.body.num_taken == 13
    assert budget.bodies.used == 0


async def test_streamed_body_waits_for_late_pieces_and_ends_with_its_last() -> None:
    source = Source(is_complete=False)
    pieces = source.body.pieces(20)
    first = asyncio.ensure_future(anext(pieces))
    await asyncio.sleep(0)
    source.pieces.append(b"late")
    source.give()
    assert await first == b"late"
    # The rest came with the end, as a connection passes on what lies there when it is asked.
    source.body._on_wanted = lambda: source.body.complete(b"rest")
    assert [piece async for piece in pieces] == [b"rest"]


@pytest.mark.parametrize("whole", [False, True])
async def test_streamed_body_is_cut_off_where_it_exceeds_the_limit(whole: bool) -> None:
    source = Source(b"12345", b"6789012")
    if whole:
        source.pieces.pop()
        source.is_complete = False
    pieces = source.body.pieces(10)
    assert await anext(pieces) == b"12345"
    if whole:
        source.body._on_wanted = lambda: source.body.complete(b"6789012")
    with pytest.raises(ApiError) as caught:
        await anext(pieces)
    assert caught.value.status == 413


async def test_client_that_leaves_ends_a_streamed_body() -> None:
    source = Source(is_complete=False)
    reading = asyncio.ensure_future(anext(source.body.pieces(10)))
    await asyncio.sleep(0)
    source.body.fail(ClientGoneError())
    with pytest.raises(ClientGoneError):
        await reading


def test_client_of_a_streamed_body_has_time_by_what_it_has_sent() -> None:
    body = Source().body
    assert body.patience_s(30) == 30
    body._waited_s = 25.0
    assert body.patience_s(30) == 5
    body.num_taken = 10 * MIN_BYTES_PER_S
    assert body.patience_s(30) == 15
    body.num_taken = 1000 * MIN_BYTES_PER_S
    assert body.patience_s(30) == 30
    body.num_taken, body._waited_s = 1, 31.0
    assert body.patience_s(30) == 0
