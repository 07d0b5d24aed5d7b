"""Streamed answers on a transport that keeps what it is given: backpressure, the cut, and what is left behind."""

from __future__ import annotations

import asyncio
import json
import math
import weakref
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec import UNSET

from gateway.admission.auth import Principal
from gateway.api.answer import Asked, Outcome, ResponseHead, StreamParts
from gateway.api.chat_answers import (
    CONTEXT_FULL,
    AnswerIdentity,
    chat_logprobs,
    completion_logprobs,
    first_token_name,
    usage_answer,
)
from gateway.api.streamed import ChoiceChunks, StreamedAnswer, encode_json
from gateway.api.usage import UsageTotals
from gateway.errors import ApiError
from gateway.generation import Kind, OutputReading
from gateway.streams.dialect import OPENAI, server_sent_event
from gateway.streams.event_stream import EventStreamLimits, Flusher
from shared.messages import Delta, Finish, TokenLogprob, Usage
from tests.gateway.kept_exchange import kept_exchange
from tests.gateway.parsed_bodies import generation
from tests.gateway.wire_worker import until

IDENTITY = AnswerIdentity("cmpl-1", "completion", "m", 7)
LIMITS = EventStreamLimits(buffer_bytes=1000, send_timeout_s=5, head_delay_s=1, keep_alive_s=10)


class Streamed:
    """An answer, its transport and its channel."""

    def __init__(self, n: int = 1, reading: OutputReading | None = None, identity: AnswerIdentity = IDENTITY) -> None:
        self.exchange, self.channel, self.transport = kept_exchange()
        asking = generation(identity.kind, n=n, stream=True, reading=reading)
        asked = Asked(self.exchange, asking, ResponseHead("req_1", 0.0), Principal("k", "t"))
        self._flusher = Flusher(asyncio.get_running_loop())
        self.answer = StreamedAnswer(asked, StreamParts(self._flusher, LIMITS, 0.0), identity)

    def say(self, position: int, text: str = "t", choice: int = 0, finish: Finish | None = None) -> None:
        self.answer.sinks[choice].deliver(Delta("r", 0, position, (position,), text, finish))

    async def flushed(self) -> None:
        """Wait until whatever was to be flushed has been."""
        await asyncio.sleep(0)
        await until(lambda: not self._flusher._is_scheduled)

    @property
    def sent(self) -> bytes:
        return self.transport.sent


def events(sent: bytes) -> list[bytes]:
    """Return the events of a chunked answer, and assert that there is nothing else in it."""
    head, _, chunks = sent.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ")
    body = b""
    while chunks:
        size, _, rest = chunks.partition(b"\r\n")
        body += rest[: int(size, 16)]
        chunks = rest[int(size, 16) + 2 :]
    *events, rest = body.split(b"\n\n")
    assert rest == b""
    assert all(event.startswith(b"data: ") for event in events)
    return events


async def test_first_token_is_written_at_once_and_the_rest_together() -> None:
    streamed = Streamed()
    streamed.say(0)
    assert len(streamed.transport.writes) == 1
    for position in range(1, 5):
        streamed.say(position)
    assert len(streamed.transport.writes) == 1
    await streamed.flushed()
    assert len(streamed.transport.writes) == 2
    assert streamed.sent.count(b'"text":"t"') == 5


@pytest.mark.parametrize("num_waiting", [1, 2, 3])
async def test_tokens_that_wait_for_a_flush_are_all_written(num_waiting: int) -> None:
    streamed = Streamed()
    for position in range(1 + num_waiting):
        streamed.say(position)
    await streamed.flushed()
    assert len(events(streamed.sent)) == 1 + num_waiting


async def test_characters_that_some_clients_take_for_ends_of_lines_are_escaped_in_every_token() -> None:
    streamed, text = Streamed(), "a\u2028b\u2029c\u0085d\u00e4"
    for position in range(3):
        streamed.say(position, text)
    await streamed.flushed()
    tokens = [event.decode() for event in events(streamed.sent)]
    assert [event.splitlines() for event in tokens] == [[event] for event in tokens]
    assert [json.loads(event.removeprefix("data: "))["choices"][0]["text"] for event in tokens] == [text] * 3


@pytest.mark.parametrize("kind", ["chat", "completion"])
async def test_token_without_text_has_a_chunk_only_with_its_log_probabilities(kind: Kind) -> None:
    streamed = Streamed(identity=AnswerIdentity("x-1", kind, "m", 7))
    entry = TokenLogprob(1, "\u00e9", b"\xc3", -1.0)
    deltas = [Delta("r", 0, 0, (1,), ""), Delta("r", 0, 1, (2,), "", logprobs=(entry,)), Delta("r", 0, 2, (3,), "c")]
    for delta in deltas:
        streamed.answer.sinks[0].deliver(delta)
    await streamed.flushed()
    choices = [json.loads(event[6:])["choices"][0] for event in events(streamed.sent)]
    texts = [choice["delta"]["content"] if kind == "chat" else choice["text"] for choice in choices]
    assert texts == (["", "", "c"] if kind == "chat" else ["", "c"])
    [told] = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    assert (told["content"][0]["token"] if kind == "chat" else told["tokens"][0]) == "\u00e9"


async def test_answer_of_one_token_is_whole() -> None:
    streamed = Streamed()
    streamed.say(0, finish=Finish("stop", Usage(1, 1)))
    assert len(streamed.transport.writes) == 1
    *tokens, done = events(streamed.sent)
    assert done == b"data: [DONE]"
    assert b'"text":"t"' in tokens[0]


async def test_last_token_finish_and_done_are_one_write() -> None:
    streamed = Streamed()
    streamed.say(0)
    streamed.say(1, finish=Finish("stop", Usage(1, 2)))
    assert len(streamed.transport.writes) == 2
    assert streamed.transport.writes[1].endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert streamed.answer.done.result() is Outcome.COMPLETED
    assert streamed.channel.num_answers == 1
    await streamed.flushed()
    assert len(streamed.transport.writes) == 2


async def test_answer_ends_with_its_last_choice() -> None:
    streamed = Streamed(n=2)
    streamed.say(0, choice=1, finish=Finish("stop", Usage(1, 1)))
    assert not streamed.answer.done.done()
    streamed.say(0, choice=0, finish=Finish("length", Usage(1, 1)))
    assert streamed.answer.done.result() is Outcome.COMPLETED
    assert streamed.sent.count(b"[DONE]") == 1


async def test_failure_before_the_first_token_is_a_status() -> None:
    streamed = Streamed()
    streamed.answer.sinks[0].fail(ApiError(503, "full", retry_after_s=2.2))
    assert streamed.sent.startswith(b"HTTP/1.1 503 ")
    assert b"retry-after: 3\r\n" in streamed.sent
    assert b"[DONE]" not in streamed.sent


async def test_nothing_follows_an_error_event() -> None:
    streamed = Streamed(n=2)
    streamed.say(0)
    streamed.answer.sinks[1].fail(ApiError(500, "broken"))
    sent = streamed.sent
    streamed.say(1)
    streamed.answer.sinks[0].fail(ApiError(500, "again"))
    await streamed.flushed()
    assert streamed.sent == sent
    assert sent.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


async def test_paused_stream_is_held_and_then_resumed_in_order() -> None:
    streamed = Streamed()
    streamed.say(0, "a")
    streamed.exchange.paused_since = 0.0
    streamed.say(1, "b")
    await streamed.flushed()
    streamed.say(2, "c")
    await streamed.flushed()
    assert b'"text":"b"' not in streamed.sent
    streamed.exchange.resume()
    sent = streamed.sent
    assert sent.index(b'"text":"a"') < sent.index(b'"text":"b"') < sent.index(b'"text":"c"')
    assert len(events(sent)) == 3


async def test_answer_that_ends_while_paused_has_everything_that_was_held() -> None:
    streamed = Streamed()
    streamed.say(0, "a")
    streamed.exchange.paused_since = 0.0
    streamed.say(1, "b")
    await streamed.flushed()
    streamed.say(2, "c", finish=Finish("stop", Usage(1, 3)))
    sent = streamed.sent
    assert sent.index(b'"text":"a"') < sent.index(b'"text":"b"') < sent.index(b'"text":"c"') < sent.index(b"[DONE]")
    assert sum(b'"text":"b"' in event for event in events(sent)) == 1


async def test_reader_that_pauses_often_and_catches_up_is_not_cut() -> None:
    streamed = Streamed()
    streamed.say(0)
    for position in range(1, 4):
        streamed.exchange.paused_since = 0.0
        streamed.say(position, "x" * 500)
        await streamed.flushed()
        streamed.exchange.resume()
    assert streamed.sent.count(b"x" * 500) == 3
    assert not streamed.answer.done.done()


async def test_reader_with_too_much_waiting_is_cut_with_an_error() -> None:
    streamed = Streamed()
    streamed.say(0)
    streamed.exchange.paused_since = 0.0
    for position in range(1, 4):
        streamed.say(position, "x" * 500)
        await streamed.flushed()
    assert streamed.answer.done.result() is Outcome.SLOW_READER
    assert b'"code":"slow_reader"' in streamed.sent
    assert b"x" * 500 not in streamed.sent
    assert streamed.transport.is_closed


async def test_reader_that_takes_nothing_for_too_long_is_cut() -> None:
    streamed = Streamed()
    streamed.say(0)
    streamed.exchange.paused_since = 10.0
    streamed.answer.tick(14.9)
    assert not streamed.answer.done.done()
    streamed.answer.tick(15.1)
    assert streamed.answer.done.result() is Outcome.SLOW_READER


async def test_silence_is_filled_with_comments() -> None:
    streamed = Streamed()
    streamed.answer.tick(0.9)
    assert streamed.sent == b""
    streamed.answer.tick(1.1)
    assert streamed.sent.startswith(b"HTTP/1.1 200 ")
    assert streamed.sent.count(OPENAI.keep_alive) == 1
    streamed.answer.tick(1.2)
    streamed.answer.tick(11.1)
    assert streamed.sent.count(OPENAI.keep_alive) == 1
    streamed.answer.tick(11.3)
    assert streamed.sent.count(OPENAI.keep_alive) == 2


async def test_closed_answer_is_freed_without_the_collector(no_collector: None) -> None:
    streamed = Streamed(n=2)
    streamed.say(0)
    for choice in range(2):
        streamed.say(1, choice=choice, finish=Finish("stop", Usage(1, 1)))
    await streamed.flushed()
    streamed.answer.close()
    answer = weakref.ref(streamed.answer)
    del streamed.answer
    assert answer() is None


CHAT = AnswerIdentity("chatcmpl-1", "chat", "m", 7)
COMPLETION = AnswerIdentity("cmpl-1", "completion", "m", 7)
LINE_ENDS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029\\\u2028"


def entry(token: str, logprob: float = -0.5, top: tuple[TokenLogprob, ...] = ()) -> TokenLogprob:
    return TokenLogprob(1, token, token.encode(), logprob, top)


def parse(event: bytes) -> dict[str, Any]:
    assert event.startswith(b"data: ")
    assert event.endswith(b"\n\n")
    assert event.count(b"\n") == 2
    # As clients split a stream that take it for a text.
    assert len(event.decode().splitlines()) == 2
    parsed: dict[str, Any] = json.loads(event[6:])
    return parsed


@example(LINE_ENDS, CHAT, False)
@given(st.text(), st.sampled_from([CHAT, COMPLETION]), st.booleans())
def test_any_text_survives_the_template(text: str, identity: AnswerIdentity, with_usage: bool) -> None:
    chunks = ChoiceChunks(identity, 3, with_usage)
    event = chunks.text(text or "x", ())
    chunk = parse(event)
    choice = chunk["choices"][0]
    assert (choice["text"] if identity is COMPLETION else choice["delta"]["content"]) == (text or "x")
    assert choice["index"] == 3
    assert choice["finish_reason"] is None
    assert ("usage" in chunk) == with_usage


def test_chat_opens_with_the_role_and_completions_with_nothing() -> None:
    assert parse(ChoiceChunks(CHAT, 0, False).opening())["choices"][0]["delta"]["role"] == "assistant"
    assert ChoiceChunks(COMPLETION, 0, False).opening() == b""


def test_chunks_are_the_same_whether_their_template_is_made_before_or_with_the_first_text() -> None:
    prepared, unprepared = (ChoiceChunks(CHAT, 0, False) for _ in range(2))
    prepared.prepare()
    text = 'a "quoted" text'
    assert prepared.text(text, ()) == prepared.prefix + b'"a \\"quoted\\" text"' + prepared.suffix
    assert prepared.text(text, ()) == unprepared.text(text, ())


def test_streamed_offsets_go_on_from_chunk_to_chunk() -> None:
    chunks = ChoiceChunks(COMPLETION, 0, False)
    first = parse(chunks.text("<s>ab", (None, entry("ab")), "<s>"))["choices"][0]["logprobs"]
    assert first["tokens"] == ["<s>", "ab"]
    assert first["token_logprobs"] == [None, -0.5]
    assert first["text_offset"] == [0, 3]
    second = parse(chunks.text("cd", (entry("cd"),)))["choices"][0]["logprobs"]
    assert second["text_offset"] == [5]


def test_finish_and_usage_chunks_have_their_shape() -> None:
    assert parse(ChoiceChunks(CHAT, 0, False).finish("stop", UNSET))["choices"][0]["delta"] == {}
    last = parse(ChoiceChunks(COMPLETION, 0, False).finish("length", CONTEXT_FULL))["choices"][0]
    assert (last["text"], last["finish_reason"], last["stop_reason"]) == ("", "length", CONTEXT_FULL)
    usage = parse(server_sent_event(encode_json(CHAT.chunk([], usage_answer(totals_of(Usage(3, 4, 2)))))))
    assert usage["choices"] == []
    assert usage["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
    assert usage["usage"]["total_tokens"] == 7
    assert "completion_tokens_details" not in usage["usage"]


def test_usage_tells_how_many_tokens_were_guessed_over_all_choices() -> None:
    usage = usage_answer(totals_of(Usage(3, 9, 2, 5, 1), Usage(3, 9, 0, 2, 4)))
    assert msgspec.to_builtins(usage)["completion_tokens_details"] == {
        "accepted_prediction_tokens": 7,
        "rejected_prediction_tokens": 5,
    }


def totals_of(*usages: Usage) -> UsageTotals:
    totals = UsageTotals(len(usages))
    for index, usage in enumerate(usages):
        totals.add(index, usage)
    return totals


def test_chat_logprobs_are_nested_with_bytes() -> None:
    top = (entry("a"), entry("b", -math.inf))
    logprobs = chat_logprobs([entry("a", -0.5, top)])
    assert msgspec.json.decode(msgspec.json.encode(logprobs.content)) == [
        {
            "token": "a",
            "logprob": -0.5,
            "bytes": [97],
            "top_logprobs": [
                {"token": "a", "logprob": -0.5, "bytes": [97]},
                {"token": "b", "logprob": -9999.0, "bytes": [98]},
            ],
        }
    ]


def test_completion_alternatives_always_have_the_chosen_token() -> None:
    logprobs = completion_logprobs([entry("z", -3.0, (entry("a", -0.1),))], 2)
    assert logprobs.top_logprobs == [{"a": -0.1, "z": -3.0}]
    assert logprobs.text_offset == [2]


def test_first_token_is_what_the_others_leave_of_the_text() -> None:
    whole = Delta("r", 0, 0, text="héllo", prompt_logprobs=(None, entry("llo")))
    assert first_token_name(whole) == "hé"
    assert first_token_name(msgspec.structs.replace(whole, text="")) == ""
    assert first_token_name(msgspec.structs.replace(whole, prompt_token_ids=(7, 9))) == "token_id:7"
