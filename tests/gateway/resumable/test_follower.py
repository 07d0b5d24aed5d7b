"""A follower whose stream changes its owner while it reads."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import ApiError
from gateway.resumable import follower
from gateway.resumable.calls import OwnerReply
from gateway.resumable.fences import Fence
from gateway.resumable.follower import Follower, LogReader
from gateway.resumable.journal import JournalTail
from gateway.resumable.live import LiveStream
from gateway.resumable.log import Stored
from gateway.resumable.record import PIECE_BYTES, Entry, PieceWriter, StreamHead
from shared.messages import Delta, Finish
from tests.gateway.resumable.test_writer import head_and_generation
from tests.waiting import until


class Log:
    """What a NATS would answer; pieces by owner."""

    def __init__(self, head: StreamHead) -> None:
        self.head = head
        self.seq = 1
        self.written: dict[str, list[bytes]] = {}
        self.journal: list[tuple[int, bytes]] = []
        self.stale: list[list[bytes]] = []
        self.may_revoke = asyncio.Event()
        self.may_revoke.set()
        self.revoked: set[str] = set()
        self.has_head = self.has_fence = True
        self.may_read = asyncio.Event()
        self.may_read.set()
        self.num_asked = self.num_waiting = 0
        self.calls = Calls(0)

    def write(self, owner: str, texts: str, *, is_whole: bool = False) -> None:
        entries: list[Any] = [(0, Delta("r", 0, at, (at,), text), None) for at, text in enumerate(texts)]
        if is_whole:
            entries.append((0, Delta("r", 0, len(texts), finish=Finish("stop")), None))
        self.written[owner] = [piece for _, piece in PieceWriter().put(entries)]

    @property
    def fences(self) -> Any:
        return SimpleNamespace(find=self.fence, revoke=self.revoke)

    async def find(self, tenant: str, stream_id: str) -> Stored | None:
        return Stored(self.head, self.seq) if self.has_head else None

    async def pieces(self, head: StreamHead, first: int, num_ahead: int = 1) -> list[bytes]:
        self.num_asked += 1
        self.num_waiting += 1
        await self.may_read.wait()
        self.num_waiting -= 1
        return (self.stale.pop() if self.stale else self.written.get(head.owner, []))[first:]

    async def revoke(self, writer: str) -> JournalTail:
        await self.may_revoke.wait()
        self.revoked.add(writer)
        return JournalTail(self.journal)

    async def fence(self, writer: str) -> Fence | None:
        return Fence(writer not in self.revoked, 1) if self.has_fence else None

    def lose(self) -> None:
        """Lose everything, as a NATS does that restarts."""
        self.written.clear()
        self.has_head = self.has_fence = False


class Calls:
    def __init__(self, num_shown: int) -> None:
        self.num_shown = num_shown
        self.is_dead = False
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def ask(self, head: StreamHead, action: str) -> OwnerReply | None:
        await self.may_answer.wait()
        return None if self.is_dead else OwnerReply(True, self.num_shown)


def case(num_shown: int = 0) -> tuple[Log, LiveStream, asyncio.Task[None]]:
    head, generation = head_and_generation()
    log, stream = Log(head), LiveStream(head, generation, 0.0)
    stream.seq = 1
    log.write("w", "ab")
    owner = cast("Any", SimpleNamespace(writer=SimpleNamespace(name="own")))
    log.calls.num_shown = num_shown
    following = Follower(cast("Any", log), cast("Any", log.calls), owner, stream).follow({stream})
    return log, stream, asyncio.create_task(following)


def texts(stream: LiveStream) -> str:
    return "".join(delta.text for _, delta, _ in stream.entries[: stream.num_shown] if delta is not None)


async def test_pieces_that_a_new_owner_has_deleted_are_read_from_its_own() -> None:
    log, stream, following = case()
    await stream.caught_up.wait()
    assert texts(stream) == "ab"
    # The new owner has read one more token than was shown here.
    log.write("v", "abcd", is_whole=True)
    log.head, log.seq = msgspec.structs.replace(log.head, owner="v", term=1), 2
    del log.written["w"]
    await asyncio.wait_for(following, 30)
    assert (texts(stream), stream.is_complete, stream.failure) == ("abcd", True, None)


async def test_a_stream_is_told_once_its_owner_has_written_what_it_showed() -> None:
    """Its client may have seen more at the owner than the pieces have yet."""
    log, stream, following = case(num_shown=4)
    await until(lambda: stream.num_shown == 2)
    await asyncio.sleep(0.1)
    assert not stream.caught_up.is_set()
    log.write("w", "abcd")
    await asyncio.wait_for(stream.caught_up.wait(), 5)
    assert texts(stream) == "abcd"
    following.cancel()


async def test_turn_of_a_reader_does_not_begin_before_the_owner_has_answered() -> None:
    log, stream, following = case()
    log.calls.may_answer.clear()
    stream.postpone_reading()
    await asyncio.sleep(0.01)
    assert not stream._is_due.is_set()
    log.calls.may_answer.set()
    await asyncio.wait_for(stream._is_due.wait(), 5)
    assert log.num_asked == 0
    following.cancel()


async def test_what_a_revoked_owner_still_writes_is_not_shown() -> None:
    log, stream, following = case()
    await stream.caught_up.wait()
    log.revoked.add("w")
    log.head, log.seq = msgspec.structs.replace(log.head, owner="v", term=1), 2
    log.write("v", "ab")
    log.write("w", "abX")
    await asyncio.sleep(0.2)
    assert texts(stream) == "ab"
    log.write("v", "abcd", is_whole=True)
    await asyncio.wait_for(following, 30)
    assert texts(stream) == "abcd"


async def test_entries_that_a_dead_owner_logged_are_read_again_after_somebody_else_has_revoked_it() -> None:
    """The other process has died before it owned the stream."""
    log, stream, following = case()
    await stream.caught_up.wait()
    long = "ab" + "x" * 900
    log.revoked.add("w")
    log.write("w", long, is_whole=True)
    assert len(log.written["w"]) > 2
    await asyncio.wait_for(following, 30)
    assert (texts(stream), stream.failure) == (long, None)


async def test_a_takeover_is_marked_from_its_begin_so_that_a_client_that_leaves_does_not_end_it() -> None:
    log, stream, following = case()
    await stream.caught_up.wait()
    log.may_revoke.clear()
    log.revoked.add("w")
    log.write("w", "abc", is_whole=True)
    await until(lambda: stream.is_held)
    assert not stream.ended.done()
    log.may_revoke.set()
    await asyncio.wait_for(following, 30)
    assert (texts(stream), stream.is_held) == ("abc", False)


@pytest.mark.parametrize(("is_deleted", "told"), [(False, (410, "stream_expired")), (True, (409, "stream_stopped"))])
async def test_pieces_that_are_dropped_end_the_stream_with_a_410_unless_a_client_has_deleted_it(
    is_deleted: bool, told: tuple[int, str]
) -> None:
    log, stream, following = case()
    await stream.caught_up.wait()
    stream.is_deleted = is_deleted
    log.written.clear()
    await asyncio.wait_for(following, 30)
    failure = stream.failure
    assert isinstance(failure, ApiError)
    assert (failure.status, failure.code) == told


@pytest.mark.parametrize("num_kept", [2, 900])
async def test_pieces_that_were_lost_with_nats_are_read_on_when_their_owner_has_put_them_back(num_kept: int) -> None:
    log, stream, following = case()
    text = "".join(chr(ord("a") + at % 26) for at in range(num_kept))
    log.write("w", text)
    await until(lambda: stream.num_shown == num_kept)
    log.lose()
    await asyncio.sleep(0.2)
    # The head comes first, by another number; then the pieces, and the fence last.
    log.has_head, log.seq = True, 77
    await asyncio.sleep(0.2)
    assert (stream.ended.done(), texts(stream)) == (False, text)
    log.write("w", text + "yz", is_whole=True)
    log.has_fence = True
    await asyncio.wait_for(following, 30)
    assert (texts(stream), stream.is_complete, stream.failure) == (text + "yz", True, None)


async def test_pieces_that_are_put_back_between_two_looks_are_read() -> None:
    log, stream, following = case()
    await stream.caught_up.wait()
    log.written.clear()
    log.may_read.clear()
    await until(lambda: log.num_waiting == 1)
    find = log.find

    async def find_later(tenant: str, stream_id: str) -> Stored | None:
        log.write("w", "abcd", is_whole=True)
        return await find(tenant, stream_id)

    log.find = find_later  # type: ignore[method-assign]
    log.may_read.set()
    await asyncio.wait_for(following, 30)
    assert (texts(stream), stream.failure) == ("abcd", None)


async def test_pieces_that_no_owner_puts_back_end_the_stream_after_the_longest_outage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(follower, "OUTAGE_S", 0.3)
    log, stream, following = case()
    await stream.caught_up.wait()
    log.lose()
    await asyncio.wait_for(following, 30)
    assert isinstance(stream.failure, ApiError)
    assert (stream.failure.status, texts(stream)) == (503, "ab")


async def test_the_end_of_a_stream_that_was_lost_with_nats_is_never_put_back() -> None:
    """Its owner has it no more once it has ended."""
    log, stream, following = case()
    await stream.caught_up.wait()
    stream.head = msgspec.structs.replace(stream.head, ended=1.0)
    log.lose()
    await asyncio.wait_for(following, 10)
    assert isinstance(stream.failure, ApiError)
    assert stream.failure.code == "stream_expired"


async def test_a_piece_that_was_read_before_the_next_one_was_begun_is_read_again() -> None:
    log, stream, following = case()
    await stream.caught_up.wait()
    long = "x" * 900
    log.write("w", "ab" + long, is_whole=True)
    whole = log.written["w"]
    assert len(whole) > 2
    # As if the first piece was read while it was shorter than when the next one was begun.
    stale = PieceWriter().put([(0, Delta("r", 0, at, (at,), text), None) for at, text in enumerate("ab")])[0][1]
    log.stale = [[stale, *whole[1:]]] * 3
    await asyncio.wait_for(following, 30)
    assert texts(stream) == "ab" + long


@given(
    sizes=st.lists(st.sampled_from([1, 50, 3000, PIECE_BYTES, 9000, 30_000]), min_size=1, max_size=12),
    rounds=st.lists(st.integers(0, 4), max_size=8),
    num_lost=st.integers(0, 12),
)
async def test_large_entries_lie_in_messages_of_bounded_size(
    sizes: list[int], rounds: list[int], num_lost: int
) -> None:
    entries: list[Entry] = [(0, Delta("r", 0, at, (at,), "x" * size), None) for at, size in enumerate(sizes)]
    head, generation = head_and_generation()
    log, stream, writer = Log(head), LiveStream(head, generation, 0.0), PieceWriter()
    reader, messages, start = LogReader(cast("Any", log), stream), dict[int, bytes](), 0
    for num_entries in [*rounds, len(entries)]:
        for number, message in writer.put(entries[start : start + num_entries]):
            messages[number] = message
            assert len(message) <= PIECE_BYTES + 16
            log.written["w"] = [messages[each] for each in sorted(messages)]
            await reader.read()
            assert stream.entries == entries[: len(stream.entries)]
        start += num_entries
        assert stream.entries == entries[:start]
    assert sorted(messages) == list(range(writer.num_messages))
    # Those that may not be shown go, and are read again.
    del stream.entries[max(0, len(entries) - num_lost) :]
    await reader.read()
    assert stream.entries == entries
