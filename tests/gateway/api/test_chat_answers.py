"""Names of answers, of their formats, and of the calls in them."""

from __future__ import annotations

import re
import time
from typing import Any

import msgspec
import pytest
from msgspec import UNSET

from gateway.api.answer import AnswerStamp
from gateway.api.chat_answers import (
    CONTEXT_FULL,
    AnswerIdentity,
    finish_reason,
    stop_reason,
    usage_answer,
)
from gateway.api.usage import UsageTotals
from gateway.generation import Generation, Kind, Prompt
from shared.messages import Finish, Usage
from shared.sampling import Sampling
from tests.gateway.api.test_read_choice import deltas, streamed, whole


@pytest.mark.parametrize(
    ("kind", "prefix", "whole", "streamed"),
    [
        ("chat", "chatcmpl-", "chat.completion", "chat.completion.chunk"),
        ("completion", "cmpl-", "text_completion", "text_completion"),
    ],
)
def test_answer_is_named_as_its_clients_know_it(kind: Kind, prefix: str, whole: str, streamed: str) -> None:
    generation = Generation(kind, "m", (Prompt(1, text="x"),), 1, Sampling(), deterministic=False)
    identity, other = (AnswerIdentity.new(generation, "fp_1") for _ in range(2))
    assert re.fullmatch(prefix + "[0-9a-f]{24}", identity.id)
    assert identity.id != other.id
    assert abs(identity.created - time.time()) < 5
    told = msgspec.to_builtins(identity.whole([], usage_answer(UsageTotals(1))))
    assert told.pop("usage")["total_tokens"] == 0
    assert told == {
        "id": identity.id,
        "object": whole,
        "created": identity.created,
        "model": "m",
        "system_fingerprint": "fp_1",
        "choices": [],
    }
    assert identity.chunk([]).object == streamed
    assert AnswerIdentity.new(generation).chunk([]).system_fingerprint is None


def test_calls_have_ids_of_their_own_that_an_answer_keeps_when_it_is_told_again() -> None:
    generation = Generation("chat", "m", (Prompt(1, text="x"),), 1, Sampling(), deterministic=False)
    stamp = AnswerStamp.new()
    first, again, other = (AnswerIdentity.new(generation, None, each) for each in (stamp, stamp, AnswerStamp.new()))
    places = [(choice, call) for choice in range(12) for call in range(12)]
    ids = [identity.call_id(*place) for identity in (first, other) for place in places]
    assert all(re.fullmatch("call_[0-9a-f]{24}", each) for each in ids)
    assert len(set(ids)) == len(ids)
    assert [again.call_id(*place) for place in places] == ids[: len(places)]
    assert first == again


@pytest.mark.parametrize(
    ("reason", "num_calls", "is_function_call", "told"),
    [
        ("stop", 0, False, "stop"),
        ("stop", 1, False, "tool_calls"),
        ("stop", 2, True, "function_call"),
        ("length", 1, False, "length"),
        ("length", 0, True, "length"),
    ],
)
def test_text_that_ended_by_itself_with_calls_ended_for_them(
    reason: str, num_calls: int, is_function_call: bool, told: str
) -> None:
    assert finish_reason(reason, num_calls, is_function_call) == told


FULL = {"stop_reason": CONTEXT_FULL}


@pytest.mark.parametrize(
    ("finish", "max_tokens", "told"),
    [
        (Finish("length", Usage(3, 5)), 5, {}),
        (Finish("length", Usage(3, 5)), 6, FULL),
        (Finish("length", Usage(3, 5)), None, FULL),
        (Finish("stop", Usage(3, 5)), 6, {}),
        (Finish("length"), 6, {}),
    ],
)
def test_full_context_is_told_from_the_limit(finish: Finish, max_tokens: int | None, told: dict[str, str]) -> None:
    assert stop_reason(finish, max_tokens) == told.get("stop_reason", UNSET)


@pytest.mark.parametrize(("reason", "told"), [("length", FULL), ("stop", {})])
async def test_choices_that_are_read_tell_it_in_their_last_piece_alone(reason: Any, told: dict[str, str]) -> None:
    said = [deltas(["C:a", "C:b"], Finish(reason, Usage(3, 2)))]
    [choice] = (await whole(said))["choices"]
    *before, last = [chunk["choices"][0] for chunk in await streamed(said)]
    for ended in (choice, last):
        assert {name: value for name, value in ended.items() if name == "stop_reason"} == told
    assert all("stop_reason" not in chunk for chunk in before)
