"""Token counts of answers of several prompts and choices."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from gateway.api.chat_answers import usage_answer
from gateway.api.schemas.parsing import parse_completion
from gateway.api.usage import UsageTotals, count_answer
from gateway.metrics import GatewayMetrics
from shared.messages import Usage


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
    use, model = metrics.by_model.tenant("m", "t"), metrics.by_model.model("m")
    assert (use.requests, use.prompt_tokens, use.cached_tokens, use.completion_tokens) == (1, 10, 4, 10)
    assert (model.longest_outputs.total, model.choices.total, model.max_tokens.total) == (7, 2, 50)
    assert 2.0 <= model.e2e_s.total < 3.0


def test_answer_that_was_broken_off_has_no_latency_but_counts_for_its_tenant() -> None:
    metrics = GatewayMetrics()
    generation = parse_completion(b'{"model": "m", "prompt": "x"}')
    count_answer(metrics, generation, "t", UsageTotals(1), time.perf_counter(), is_complete=False)
    assert metrics.by_model.tenant("m", "t").requests == 1
    assert metrics.by_model.model("m").e2e_s.count == metrics.by_model.model("m").longest_outputs.count == 0
