"""What readers of a stream wait for, and what counts against their limits."""

from __future__ import annotations

import asyncio
import secrets
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import msgspec
import pytest

from gateway.admission.auth import Principal
from gateway.admission.limits import READ_BYTES, RateLimiter
from gateway.admission.stored_reads import CONCURRENT_READERS, StoredReads
from gateway.api.generation_service import GenerationService
from gateway.errors import ApiError
from gateway.metrics import GatewayMetrics
from gateway.resumable.live import LiveStream
from tests.gateway.resumable.test_follower import Log, case, texts
from tests.waiting import until

TEXT = "x" * 3000
READS_PER_MINUTE = 1000


def postponed(ended: float | None = None) -> tuple[Log, LiveStream, asyncio.Task[None]]:
    """A stream whose pieces are read when a reader has its turn."""
    log, stream, following = case(num_shown=len(TEXT))
    log.head = stream.head = msgspec.structs.replace(stream.head, ended=ended)
    log.write("w", TEXT, is_whole=ended is not None)
    stream.postpone_reading()
    return log, stream, following


class Readers:
    """The readers of one key."""

    def __init__(self) -> None:
        self.reads = StoredReads(RateLimiter(None, GatewayMetrics()))
        self.principal = Principal(f"key_{secrets.token_hex(8)}", "t", reads_per_minute=READS_PER_MINUTE)

    async def read(self, stream: LiveStream) -> None:
        with stream.kept():
            await stream.read_stored(self.reads.turn(self.principal, "streams"))

    async def num_counted(self) -> int:
        """The reads that have counted so far; uses up all others."""
        for number in range(READS_PER_MINUTE + 1):
            try:
                async with self.reads.turn(self.principal, "streams"):
                    pass
            except ApiError:
                return READS_PER_MINUTE - number
        raise AssertionError("there is no limit")


@pytest.mark.parametrize("ended", [None, 1.0])
async def test_pieces_are_read_in_the_turn_of_the_reader_for_whom_they_count(ended: float | None) -> None:
    _, stream, following = postponed(ended)
    readers = Readers()
    await asyncio.sleep(0.1)
    assert not stream.entries
    await asyncio.wait_for(asyncio.gather(*(readers.read(stream) for _ in range(3))), 5)
    assert texts(stream) == TEXT
    assert stream.num_read_bytes > READ_BYTES
    following.cancel()
    # The others found them in memory.
    assert await readers.num_counted() == -(-stream.num_read_bytes // READ_BYTES) + 2


async def test_reader_of_a_stream_of_which_nothing_could_be_read_gets_the_error_instead_of_an_answer() -> None:
    _, stream, following = postponed()
    following.cancel()
    stream.abort(ApiError(503, "The log does not answer."))
    answer = Mock()
    with pytest.raises(ApiError, match="does not answer"):
        await stream.join(answer)
    answer.open.assert_not_called()


async def test_stream_in_memory_counts_as_one_read() -> None:
    _, stream, following = postponed()
    stream.allow_reading()
    await asyncio.wait_for(stream.caught_up.wait(), 5)
    readers = Readers()
    await readers.read(stream)
    following.cancel()
    assert await readers.num_counted() == 1


async def test_tenant_reads_pieces_of_a_few_streams_at_once() -> None:
    streams = [postponed() for _ in range(3 * CONCURRENT_READERS)]
    for log, _, _ in streams:
        log.may_read.clear()
    readers = Readers()
    reading = asyncio.gather(*(readers.read(stream) for _, stream, _ in streams))
    await asyncio.sleep(0.1)
    assert sum(log.num_asked > 0 for log, _, _ in streams) == CONCURRENT_READERS
    for log, _, _ in streams:
        log.may_read.set()
    await asyncio.wait_for(reading, 5)
    assert all(texts(stream) == TEXT for _, stream, _ in streams)
    for _, _, following in streams:
        following.cancel()


async def test_stream_without_a_turn_ends_with_its_readers() -> None:
    log, stream, following = postponed()
    await asyncio.sleep(0.1)
    stream.end()
    await asyncio.wait_for(following, 5)
    await asyncio.wait_for(Readers().read(stream), 5)
    assert (log.num_asked, stream.entries) == (0, [])


async def test_fence_of_a_dead_owner_stands_until_a_reader_has_its_turn() -> None:
    log, stream, following = postponed()
    log.calls.is_dead = True
    await asyncio.sleep(0.1)
    assert not log.revoked
    log.write("w", TEXT, is_whole=True)
    await asyncio.wait_for(Readers().read(stream), 5)
    await asyncio.wait_for(following, 5)
    assert (log.revoked, texts(stream)) == ({"w"}, TEXT)


class PausedAnswer:
    """An answer whose client reads nothing."""

    is_paused = True

    def __init__(self) -> None:
        self.done = asyncio.get_running_loop().create_future()
        self.is_open = False
        self.sinks = [SimpleNamespace(deliver=lambda delta: None)]

    def open(self) -> None:
        self.is_open = True

    def check_position(self) -> None:
        """The client has an event to come."""

    def close(self) -> None:
        """Nothing is left to be closed."""


async def test_paused_clients_hold_no_turn_and_what_was_read_for_them_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    readers, answers = Readers(), [PausedAnswer() for _ in range(2 * CONCURRENT_READERS)]
    streams = [postponed() for _ in answers]
    waiting = iter(answers)
    service = SimpleNamespace(
        _services=SimpleNamespace(reads=readers.reads),
        _new_answer=lambda endpoint, asked: next(waiting),
        _streamed=set(),
        _logged=SimpleNamespace(leave=lambda stream, answer: None),
        _status_of=lambda answer, outcome: 200,
    )

    async def show(stream: LiveStream) -> int:
        none = cast("Any", None)
        return await GenerationService.show(cast("Any", service), none, stream, none, none, readers.principal)

    monkeypatch.setattr(LiveStream, "asked", lambda *_: None)
    showing = [asyncio.create_task(show(stream)) for _, stream, _ in streams]
    await until(lambda: all(answer.is_open for answer in answers))
    assert not any(task.done() for task in showing)
    each = -(-streams[0][1].num_read_bytes // READ_BYTES)
    assert await readers.num_counted() == each * len(answers)
    for task in (*showing, *(following for _, _, following in streams)):
        task.cancel()
