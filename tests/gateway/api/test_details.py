"""What answers report besides their text, in chunks and in whole answers, of text alone and of text that is read."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from msgspec import UNSET

from gateway.api.chat_answers import AnswerIdentity
from gateway.api.details import ChoiceDetails, DetailedSink
from gateway.api.streamed import ChoiceChunks
from gateway.errors import ApiError
from gateway.generation import Details, Kind
from shared.messages import Delta, TokenLogprob
from tests.gateway.dispatch_bench import ListSink

ENTRY = TokenLogprob(5, "a", b"a", -0.5, (TokenLogprob(6, "b", b"b", -0.25),))


def event(chunk: bytes) -> dict[str, Any]:
    return json.loads(chunk.removeprefix(b"data: "))  # type: ignore[no-any-return]


def identity(kind: Kind) -> AnswerIdentity:
    return AnswerIdentity("x-1", kind, "m", 7, "fp_1")


def noted(wanted: Details, kind: Kind, *deltas: Delta) -> tuple[ChoiceDetails, ListSink]:
    details, kept = ChoiceDetails(wanted, kind), ListSink()
    sink = DetailedSink(kept, details)
    for delta in deltas:
        sink.deliver(delta)
    return details, kept


FIRST = Delta("r", 0, 0, (5,), "a", prompt_logprobs=(None, ENTRY), prompt_tokens=2, prompt_token_ids=(1, 5))
SECOND = Delta("r", 0, 1, (6, 7), "b", logprobs=(ENTRY,))


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_token_ids_are_those_since_the_last_chunk_and_the_prompts_come_once(kind: Kind) -> None:
    details = ChoiceDetails(Details(token_ids=True), kind)
    chunks = ChoiceChunks(identity(kind), 0, False, details)
    details.note(FIRST)
    details.note(Delta("r", 0, 1, (6,), ""))
    first = event(chunks.text(FIRST.text, ()))
    details.note(SECOND)
    last = event(chunks.finish("stop", UNSET))
    assert [chunk["choices"][0]["token_ids"] for chunk in (first, last)] == [[5, 6], [6, 7]]
    holder = first if kind == "chat" else first["choices"][0]
    assert holder["prompt_token_ids"] == [1, 5]
    assert "prompt_token_ids" not in last | last["choices"][0]
    assert first["system_fingerprint"] == "fp_1"


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_prompt_logprobs_stand_apart(kind: Kind) -> None:
    details, kept = noted(Details(prompt_logprobs=True), kind, FIRST)
    chunks = ChoiceChunks(identity(kind), 0, False, details)
    first, second = (event(chunks.text("a", ())) for _ in range(2))
    holder = first if kind == "chat" else first["choices"][0]
    assert holder["prompt_logprobs"] == [
        None,
        {
            "5": {"logprob": -0.5, "rank": None, "decoded_token": "a"},
            "6": {"logprob": -0.25, "rank": 1, "decoded_token": "b"},
        },
    ]
    assert "prompt_logprobs" not in second | second["choices"][0]
    assert kept.deltas[0].prompt_logprobs is None
    _, kept = noted(Details(prompt_logprobs=True, echoes_logprobs=True), kind, FIRST)
    assert kept.deltas == [msgspec.structs.replace(FIRST, prompt_token_ids=None)]


def test_chunks_of_text_that_is_read_have_log_probabilities_where_there_are_any() -> None:
    chunks = ChoiceChunks(identity("chat"), 0, False)
    for logprobs, tokens in (((), None), ((ENTRY,), ["a"])):
        found = event(chunks.text("a", logprobs))["choices"][0]["logprobs"]
        assert (None if found is None else [entry["token"] for entry in found["content"]]) == tokens


@pytest.mark.parametrize("with_usage", [False, True])
def test_usage_so_far_is_in_every_chunk(with_usage: bool) -> None:
    details = ChoiceDetails(Details(usage_so_far=True), "chat")
    chunks = ChoiceChunks(identity("chat"), 0, with_usage, details)
    usages = []
    for delta in (FIRST, SECOND):
        details.note(delta)
        usages.append(event(chunks.text(delta.text, ()))["usage"])
    assert usages == [
        {"prompt_tokens": 2, "completion_tokens": 1, "total_tokens": 3},
        {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5},
    ]
    assert event(chunks.reasoning("r", ()))["usage"]["total_tokens"] == 5
    assert event(chunks.arguments(0, "{", ()))["usage"]["total_tokens"] == 5


def test_tokens_are_called_by_their_ids() -> None:
    _, kept = noted(Details(tokens_as_ids=True, echoes_logprobs=True), "completion", FIRST, SECOND)
    [entry] = kept.deltas[1].logprobs or ()
    assert (entry.token, entry.top[0].token, entry.bytes) == ("token_id:5", "token_id:6", b"a")
    prompt = kept.deltas[0].prompt_logprobs
    assert prompt is not None
    assert prompt[0] is None
    assert prompt[1] == entry
    assert kept.deltas[0].logprobs is None


def test_opening_comes_once_and_with_the_first_token() -> None:
    claim = Delta("r", 0, 0, prompt_tokens=2)
    _, kept = noted(Details(opening="so: "), "chat", claim, FIRST, SECOND)
    assert [delta.text for delta in kept.deltas] == ["", "so: a", "b"]


def test_failure_is_passed_on() -> None:
    kept, wanted = ListSink(), Details(token_ids=True)
    error = ApiError(500, "no")
    DetailedSink(kept, ChoiceDetails(wanted, "chat")).fail(error)
    assert (kept.error, kept.endings) == (error, 1)
