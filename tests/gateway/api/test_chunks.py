"""The bytes of streamed chunks and of log probabilities, against the JSON that OpenAI's API defines."""

from __future__ import annotations

import json
import math
from typing import Any

import msgspec
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec import UNSET

from gateway.api.chat_answers import (
    CONTEXT_FULL,
    AnswerIdentity,
    chat_logprobs,
    completion_logprobs,
    first_token_name,
    usage_answer,
)
from gateway.api.streamed import ChoiceChunks, encode_json
from gateway.api.usage import UsageTotals
from gateway.streams.dialect import server_sent_event
from shared.messages import Delta, TokenLogprob, Usage

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
