"""Entries in the journal: whoever takes streams over has all that was shown, whenever that is."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.resumable import writer as writing
from gateway.resumable.follower import LogReader
from gateway.resumable.journal import SLOTS, JournalTail, JournalWriter, Span
from gateway.resumable.live import LiveStream, LoggedSink
from gateway.resumable.record import FIRST_PART, LAST_PART, MIDDLE_PART, Entry, StreamHead, decode_piece
from gateway.resumable.writer import LogWriter
from shared.messages import Delta, Finish
from tests.gateway.resumable.test_writer import head_and_generation
from tests.waiting import until


class Log:
    """The subjects of a JetStream stream: each has its last message."""

    def __init__(self) -> None:
        self.pieces_of: dict[str, dict[int, bytes]] = {}
        self.slots: dict[int, tuple[int, bytes]] = {}
        self.span: Span = (0, 0)
        self.failures: list[Exception] = []
        self.num_messages = self.num_rounds = 0
        self.fences = self

    def send(self, tenant: str, stream_id: str, owner: str, number: int, *, payload: bytes) -> None:
        self.num_messages += 1
        self.pieces_of.setdefault(stream_id, {})[number] = payload

    def send_journal(self, writer: str, number: int, payload: bytes) -> None:
        self.num_messages += 1
        self.slots[number % SLOTS] = number, payload

    async def write(self, writer: str, seq: int, span: Span) -> int | None:
        if self.failures:
            raise self.failures.pop()
        self.span = span
        self.num_rounds += 1
        return seq + 1

    def together(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def count(self, tenant: str, num_messages: int) -> None:
        pass

    async def pieces(self, head: StreamHead, first: int, num_ahead: int = 1) -> list[bytes]:
        found = self.pieces_of[head.id]
        return [found[number] for number in range(first, len(found))]

    def in_pieces(self, stream: LiveStream) -> list[Entry]:
        """Return the entries that the pieces of a stream have, those of several messages too."""
        messages = (self.pieces_of[stream.head.id][number] for number in sorted(self.pieces_of[stream.head.id]))
        entries, parts = list[Entry](), b""
        for message in messages:
            if message[:2] in (FIRST_PART, MIDDLE_PART, LAST_PART):
                parts += message[2:]
                if message[:2] != LAST_PART:
                    continue
                message, parts = parts, b""
            entries += decode_piece(message)[1]
        return entries

    def tail(self) -> JournalTail:
        """Return the end of the journal, as whoever revokes the fence reads it."""
        return JournalTail(self.slots[number % SLOTS] for number in range(*self.span))

    async def taken_over(self, stream: LiveStream, tail: JournalTail) -> list[Entry]:
        """Return the entries that another process would have after reading pieces."""
        other = LiveStream(stream.head, stream.generation, 0.0)
        await LogReader(cast("Any", self), other).read()
        tail.extend(other.head, other.entries)
        return other.entries


class Case:
    """Streams under one writer."""

    def __init__(self, num_streams: int) -> None:
        self.log = Log()
        self.uses_journal = True
        nothing: Any = lambda *_: None  # noqa: E731
        self.writer = LogWriter(
            cast("Any", self.log), 1 << 30, lambda: self.uses_journal, nothing, nothing, nothing, nothing
        )
        head, generation = head_and_generation()
        self.streams = [
            LiveStream(msgspec.structs.replace(head, id=str(number)), generation, 0.0) for number in range(num_streams)
        ]
        for stream in self.streams:
            self.writer.own(stream)

    def say(self, stream: LiveStream, text: str, *, is_last: bool = False) -> None:
        at = stream.num_entries
        finish = Finish("stop") if is_last else None
        LoggedSink(stream, 0, lambda _: None).deliver(Delta("r", 0, at, (at,), text, finish=finish))

    async def round(self, streams: list[LiveStream]) -> None:
        await asyncio.gather(*(self.writer.settle(stream) for stream in streams if stream in self.writer.owned))

    async def check(self) -> None:
        """Compare what another process would have now with what was shown."""
        tail = self.log.tail()
        for stream in self.streams:
            if stream.has_last_entry:
                # Followers, and readers of a stream that has ended, read no journal.
                assert [entry[1] for entry in stream.entries] == [entry[1] for entry in self.log.in_pieces(stream)]
            if stream.pieces is not None and stream.pieces.has_begun:
                found = await self.log.taken_over(stream, tail)
                assert found == stream.entries[: len(found)]
                assert len(found) >= stream.num_shown


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MIN_ROUND_S", "MAX_PAUSE_S", "_RETRY_S"):
        monkeypatch.setattr(writing, name, 0.0)


_STEPS = st.one_of(
    st.tuples(
        st.just("say"), st.lists(st.tuples(st.integers(0, 5), st.sampled_from([1, 1, 1, 70_000, 300_000])), max_size=6)
    ),
    st.tuples(st.just("note"), st.integers(0, 5)),
    st.tuples(st.just("end"), st.integers(0, 5)),
    st.tuples(st.just("follow"), st.integers(0, 5)),
    st.tuples(st.just("switch"), st.booleans()),
    st.tuples(st.just("fail"), st.just(0)),
)


@settings(max_examples=60)
@given(steps=st.lists(_STEPS, max_size=40))
async def test_pieces_and_journal_have_what_was_shown(steps: list[tuple[str, Any]]) -> None:
    case = Case(6)
    ended: set[LiveStream] = set()
    for kind, value in steps:
        if kind == "switch":
            case.uses_journal = value
        elif kind == "fail":
            case.log.failures.append(OSError())
        elif kind == "follow":
            case.streams[value].is_followed = True
        elif kind == "note":
            # It waits until a round is due, while others do not.
            if case.streams[value] not in ended:
                case.say(case.streams[value], "n")
                case.writer.note(case.streams[value])
        else:
            places = [(value, 1)] if kind == "end" else value
            said = {case.streams[place]: size for place, size in places if case.streams[place] not in ended}
            for stream, size in said.items():
                case.say(stream, "x" * size, is_last=kind == "end")
                ended |= {stream} if kind == "end" else set()
            await case.round(list(said))
        await case.check()
    # What has ended, and all while another version runs, is in the pieces alone.
    case.uses_journal = False
    await case.round(case.streams)
    case.log.span = (0, 0)
    await case.check()
    await case.writer.close()


async def test_first_entries_do_not_wait_until_the_round_of_all_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(3)
    for name in ("MAX_ROUND_S", "_ROUND_OF_EACH_S"):
        monkeypatch.setattr(writing, name, 3600.0)
    old, *new = case.streams
    for stream in (old, old, *new):
        case.say(stream, "a")
        case.writer.note(stream)
        await until(lambda: case.log.num_rounds and all(each.num_shown for each in new if each.entries))
    assert [stream.num_shown for stream in case.streams] == [1, 1, 1]
    assert case.log.num_rounds <= 3
    await case.round([old])
    assert old.num_shown == 2
    await case.check()
    await case.writer.close()


async def test_a_silent_stream_is_not_overwritten_in_the_journal() -> None:
    case = Case(40)
    await case.round(case.streams)
    case.say(case.streams[0], "a")
    await case.round(case.streams[:1])
    for _ in range(3 * SLOTS):
        for stream in case.streams[1:]:
            case.say(stream, "b")
        await case.round(case.streams[1:])
        first, end = case.log.span
        assert end - first < SLOTS
    await case.check()
    await case.writer.close()


async def test_a_round_writes_the_pieces_of_a_part_of_the_streams_in_turn() -> None:
    journal, (head, generation) = JournalWriter(), head_and_generation()
    streams = [LiveStream(msgspec.structs.replace(head, id=str(number)), generation, 0.0) for number in range(192)]
    for stream in streams:
        journal._behind[stream] = 0
    assert journal.due(is_all=True) == streams
    assert journal.due(is_all=False) == streams[:2]
    journal.forget(streams[0])
    assert journal.due(is_all=False) == streams[1:3]
    # The first entries of a stream wait for no pieces of others, unless the journal's messages would be overwritten.
    assert journal.due(is_all=False, is_urgent=True) == []
    journal._next = SLOTS
    assert journal.due(is_all=False, is_urgent=True) == streams[1:]


async def test_shown_entries_are_kept_encoded_and_are_the_same_when_they_are_read() -> None:
    case = Case(1)
    (stream,) = case.streams
    told: list[str] = []
    for number in range(40):
        text = str(number) * (1 + number % 3)
        told.append(text)
        case.say(stream, text)
        await case.round([stream])
    # Those of some rounds are in pieces alone.
    assert {bytes, list} == {type(each) for each in stream._packed}
    assert (stream.num_shown, stream.num_entries) == (40, 40)
    case.say(stream, "unconfirmed")
    assert [delta.text for _, delta, _ in stream.entries if delta is not None] == [*told, "unconfirmed"]
    await case.round([stream])
    assert stream.num_shown == 41
    await case.check()
    # What another owner may have is forgotten, and nothing else.
    case.say(stream, "unconfirmed")
    stream.disown()
    assert len(stream.entries) == 41
    await case.writer.close()


async def test_a_round_of_many_streams_is_few_messages() -> None:
    case = Case(256)
    await case.round(case.streams)
    before, num_rounds = case.log.num_messages, 64
    for _ in range(num_rounds):
        for stream in case.streams:
            case.say(stream, "a")
        await case.round(case.streams)
    assert (case.log.num_messages - before) / num_rounds <= 256 / 48 + 3
    await case.check()
    await case.writer.close()
