"""Names of answers, of their formats, and of the calls in them."""

from __future__ import annotations

import re
import time
from typing import Any

import msgspec
import pytest

from gateway.api.answer import AnswerStamp
from gateway.api.chat_answers import (
    CONTEXT_FULL,
    AnswerIdentity,
    finish_reason,
    is_context_full,
    usage_answer,
)
from gateway.api.schemas.parsing import parse_completion
from gateway.api.usage import UsageTotals, count_answer
from gateway.generation import Generation, Kind, Prompt
from gateway.metrics import GatewayMetrics
from shared.messages import Finish, Usage
from shared.sampling import Sampling
from tests.gateway.api.test_read_choice import deltas, streamed, whole
from tests.gateway.parsed_bodies import generation


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
    stamp = AnswerStamp.new()
    first, again, other = (AnswerIdentity.new(generation(), None, each) for each in (stamp, stamp, AnswerStamp.new()))
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
    assert is_context_full(finish, max_tokens) is bool(told)


@pytest.mark.parametrize(("reason", "told"), [("length", FULL), ("stop", {})])
async def test_choices_that_are_read_tell_it_in_their_last_piece_alone(reason: Any, told: dict[str, str]) -> None:
    said = [deltas(["C:a", "C:b"], Finish(reason, Usage(3, 2)))]
    [choice] = (await whole(said))["choices"]
    *before, last = [chunk["choices"][0] for chunk in await streamed(said)]
    for ended in (choice, last):
        assert {name: value for name, value in ended.items() if name == "stop_reason"} == told
    assert all("stop_reason" not in chunk for chunk in before)


def test_prompts_count_once_and_choices_each() -> None:
    totals = UsageTotals(2)
    for index, usage in enumerate((Usage(10, 1, 4), Usage(10, 2, 9), Usage(20, 3, 5), Usage(20, 40, 9))):
        totals.add(index, usage)
    assert (totals.prompt_tokens, totals.cached_tokens, totals.completion_tokens) == (30, 9, 46)
    assert totals.longest_completion == 40
    assert msgspec.to_builtins(usage_answer(totals)) == {
        "prompt_tokens": 30,
        "completion_tokens": 46,
        "total_tokens": 76,
        "prompt_tokens_details": {"cached_tokens": 9},
    }


def test_what_is_not_known_counts_nothing() -> None:
    totals = UsageTotals(1)
    assert (totals.prompt_tokens, totals.completion_tokens, totals.longest_completion) == (0, 0, 0)
    totals.add(1, Usage(5, 3, 0, 1, 2))
    totals.add(2, None)
    assert (totals.prompt_tokens, totals.completion_tokens, totals.longest_completion) == (5, 3, 3)
    assert (totals.accepted_prediction_tokens, totals.rejected_prediction_tokens) == (1, 2)


def test_finished_choices_of_an_answer_that_was_broken_off_count_once() -> None:
    totals = UsageTotals(2)
    totals.add(1, Usage(10, 5, 4))
    totals.count_delivered(10, 5 + 3)
    assert (totals.prompt_tokens, totals.completion_tokens) == (10, 8)
    totals.count_delivered(0, 0)
    assert (totals.prompt_tokens, totals.completion_tokens) == (10, 8)


def test_drafts_and_reasoning_are_told_where_there_were_any() -> None:
    def details(usage: Usage, reasoning: int) -> Any:
        totals = UsageTotals(2)
        totals.add(0, usage)
        totals.add(1, usage)
        totals.reasoning_tokens = reasoning
        return msgspec.to_builtins(usage_answer(totals)).get("completion_tokens_details")

    assert details(Usage(5, 3), 0) is None
    assert details(Usage(5, 3), 2) == {"reasoning_tokens": 2}
    drafts = {"accepted_prediction_tokens": 2, "rejected_prediction_tokens": 0}
    assert details(Usage(5, 3, 0, 1, 0), 0) == drafts
    assert details(Usage(5, 3, 0, 0, 2), 1) == {
        "accepted_prediction_tokens": 0,
        "rejected_prediction_tokens": 4,
        "reasoning_tokens": 1,
    }


def totals(*completions: int, cached: int = 0) -> UsageTotals:
    usage = UsageTotals(len(completions))
    for index, completion in enumerate(completions):
        usage.add(index, Usage(10, completion, cached))
    return usage


def test_prompt_of_several_choices_counts_once_and_the_longest_choice_is_told() -> None:
    metrics = GatewayMetrics()
    generation = parse_completion(b'{"model": "m", "prompt": "x", "n": 2, "max_tokens": 50}')
    started = time.perf_counter() - 2.0
    count_answer(metrics, generation, "t", totals(3, 7, cached=4), started, is_complete=True)
    assert (metrics.prompt_tokens, metrics.cached_prompt_tokens, metrics.completion_tokens) == (10, 4, 10)
    use, model = metrics.by_model.tenant("m", "t"), metrics.by_model.models["m"]
    assert (use.requests, use.prompt_tokens, use.cached_tokens, use.completion_tokens) == (1, 10, 4, 10)
    assert (model.longest_outputs.total, model.choices.total, model.max_tokens.total) == (7, 2, 50)
    assert 2.0 <= model.e2e_s.total < 3.0


def test_answer_that_was_broken_off_has_no_latency_but_counts_for_its_tenant() -> None:
    metrics = GatewayMetrics()
    generation = parse_completion(b'{"model": "m", "prompt": "x"}')
    count_answer(metrics, generation, "t", UsageTotals(1), time.perf_counter(), is_complete=False)
    assert metrics.by_model.tenant("m", "t").requests == 1
    assert metrics.by_model.models["m"].e2e_s.count == metrics.by_model.models["m"].longest_outputs.count == 0
