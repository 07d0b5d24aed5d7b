"""Rounds of the log: what is shown when, and what happens when the fence is another one."""

from __future__ import annotations

import asyncio
import contextlib
from types import SimpleNamespace
from typing import Any, cast

import pytest
from nats.errors import TimeoutError as NatsTimeoutError

from gateway.api.answer import AnswerStamp
from gateway.generation import Generation, Prompt
from gateway.resumable.fences import Fence
from gateway.resumable.journal import Span
from gateway.resumable.live import LiveStream, LoggedSink
from gateway.resumable.record import StreamForm, StreamHead, decode_piece
from gateway.resumable.writer import MIN_ROUND_S, LogWriter
from shared.messages import Delta
from shared.sampling import Sampling
from tests.waiting import until


class Log:
    """Keeps pieces, and writes the fence when the test lets it."""

    def __init__(self) -> None:
        self.pieces: dict[int, bytes] = {}
        self.journal: dict[int, bytes] = {}
        self.answers: asyncio.Queue[int | Exception | None] = asyncio.Queue()
        self.found: Fence | None = None
        self.num_made = self.num_rounds = 0
        self.fences = self

    def send(self, tenant: str, stream_id: str, owner: str, number: int, *, payload: bytes) -> None:
        self.pieces[number] = payload

    def send_journal(self, writer: str, number: int, payload: bytes) -> None:
        self.journal[number] = payload

    async def write(self, writer: str, seq: int, span: Span) -> int | None:
        self.num_rounds += 1
        answer = await self.answers.get()
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def find(self, writer: str) -> Fence | None:
        return self.found

    async def ensure(self) -> None:
        self.num_made += 1

    def together(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def count(self, tenant: str, num_messages: int) -> None:
        pass

    @property
    def texts(self) -> str:
        entries = [entry for number in sorted(self.pieces) for entry in decode_piece(self.pieces[number])[1]]
        return "".join(delta.text for _, delta, _ in entries if delta is not None)


def head_and_generation() -> tuple[StreamHead, Generation]:
    generation = Generation("completion", "m", (Prompt(1),), 1, Sampling(), deterministic=False)
    head = StreamHead(
        id="s",
        tenant="t",
        key_id="k",
        model="m",
        form=StreamForm.of(generation, "completion"),
        stamp=AnswerStamp("a", 0),
        fingerprint=None,
        owner="w",
        num_request_pieces=0,
        created=0.0,
    )
    return head, generation


class Case:
    """One stream under a writer, read by one answer."""

    def __init__(self, max_bytes: int = 1 << 20) -> None:
        self.log = Log()
        self.revoked = 0
        self.uses_journal = False
        self.lost: list[LiveStream] = []
        self.writer = LogWriter(
            cast("Any", self.log),
            max_bytes,
            lambda: self.uses_journal,
            self._revoke,
            lambda stream: None,
            self.lost.append,
            self._cut,
        )
        head, generation = head_and_generation()
        self.stream = LiveStream(head, generation, 0.0)
        self.writer.own(self.stream)
        self.sink = LoggedSink(self.stream, 0, self._note)
        self.shown = ""
        answer = SimpleNamespace(sinks=[self], done=asyncio.Future(), fail=None)
        self.stream._views.append(cast("Any", answer))

    def deliver(self, delta: Delta) -> None:
        self.shown += delta.text

    def say(self, text: str) -> None:
        for position, character in enumerate(text, self.stream.num_entries):
            self.sink.deliver(Delta("r", 0, position, (position,), character))

    def _note(self, stream: LiveStream) -> None:
        if stream.is_cut:
            stream.show_unkept()
        else:
            self.writer.note(stream)

    def _revoke(self) -> None:
        self.revoked += 1

    def _cut(self, stream: LiveStream) -> None:
        stream.is_cut = True
        stream.show_unkept()


async def test_entries_are_shown_when_the_log_has_them() -> None:
    case = Case()
    case.say("ab")
    await until(lambda: case.log.pieces)
    case.say("cd")
    await asyncio.sleep(0.05)
    assert (case.log.texts, case.shown) == ("ab", "")
    case.log.answers.put_nowait(1)
    await until(lambda: case.log.texts == "abcd")
    assert case.shown == "ab"
    case.log.answers.put_nowait(2)
    await until(lambda: case.shown == "abcd")
    await case.writer.close()


async def test_a_stream_that_becomes_too_large_amid_a_round_loses_nothing() -> None:
    case = Case(max_bytes=100)
    case.say("abcdefgh")
    await until(lambda: case.stream.is_cut)
    # The fence of the round is still on its way.
    case.say("ijk")
    case.log.answers.put_nowait(1)
    await asyncio.sleep(0.05)
    case.say("lmn")
    assert case.shown == "abcdefghijklmn"
    await case.writer.close()


async def test_a_stream_that_was_too_large_is_not_written_again_after_a_round_that_failed() -> None:
    case = Case(max_bytes=100)
    case.say("abcdefgh")
    await until(lambda: case.stream.is_cut)
    case.log.pieces.clear()
    case.log.answers.put_nowait(NatsTimeoutError())
    await until(lambda: case.log.num_rounds == 2)
    assert case.log.pieces == {}
    await case.writer.close()


async def test_an_urgent_round_writes_no_pieces_that_can_wait() -> None:
    case = Case()
    case.uses_journal = True
    case.say("a")
    case.log.answers.put_nowait(1)
    await until(lambda: case.shown == "a")
    case.say("b")
    case.log.answers.put_nowait(2)
    await until(lambda: case.shown == "ab")
    assert case.log.texts == "a", "the journal has the rest"
    for is_urgent, texts in ((True, "a"), (False, "ab")):
        case.writer._is_urgent = is_urgent
        case.writer._write([])
        assert case.log.texts == texts
    await case.writer.close()


async def test_a_stream_that_ends_before_its_round_takes_none() -> None:
    case = Case()
    case.say("ab")
    case.writer.disown(case.stream)
    await asyncio.sleep(4 * MIN_ROUND_S)
    assert (case.log.num_rounds, case.log.pieces) == (0, {})
    await case.writer.close()


async def test_a_stream_that_becomes_too_large_in_a_round_of_others_shows_later_entries_at_once() -> None:
    case = Case(max_bytes=100)
    case.say("abcdefgh")
    case.writer._write_pieces(case.stream)
    assert case.stream.is_cut
    case.say("ijk")
    assert case.shown == "abcdefghijk"
    await case.writer.close()


async def test_prompt_of_a_moved_stream_counts_once_although_its_entries_are_dropped() -> None:
    case = Case()
    case.stream.is_cut = True
    for epoch, position in ((0, 0), (1, 2)):
        case.sink.deliver(Delta("r", epoch, position, prompt_tokens=7))
        case.sink.deliver(Delta("r", epoch, position, (1, 2), "ab"))
    assert (case.stream.entries, case.stream.delivered()) == ([], (7, 4))
    await case.writer.close()


async def test_a_fence_that_another_has_written_shows_nothing_more() -> None:
    case = Case()
    case.say("ab")
    case.log.found = Fence(is_own=False, seq=9)
    case.log.answers.put_nowait(None)
    await until(lambda: case.revoked)
    case.say("cd")
    await asyncio.sleep(0.05)
    assert (case.shown, case.revoked, case.writer.is_revoked) == ("", 1, True)


@pytest.mark.parametrize("failure", [NatsTimeoutError(), OSError()])
async def test_what_an_unanswered_round_wrote_is_written_again(failure: Exception) -> None:
    case = Case()
    case.say("ab")
    await until(lambda: case.log.pieces)
    case.log.pieces.clear()
    case.log.answers.put_nowait(failure)
    # The fence had been written all the same: it is the writer's own, with a number that it does not know.
    case.log.found = Fence(is_own=True, seq=4)
    case.log.answers.put_nowait(None)
    case.log.answers.put_nowait(5)
    await until(lambda: case.shown == "ab")
    assert case.log.texts == "ab"
    assert not case.writer.is_revoked
    await case.writer.close()


async def test_a_log_that_was_lost_is_filled_again() -> None:
    case = Case()
    case.say("ab")
    case.log.answers.put_nowait(1)
    await until(lambda: case.shown == "ab")
    case.log.pieces.clear()
    case.say("c")
    case.log.answers.put_nowait(None)
    case.log.answers.put_nowait(1)
    await until(lambda: case.shown == "abc")
    assert (case.log.texts, case.lost, case.log.num_made) == ("abc", [case.stream], 1)
    await case.writer.close()
