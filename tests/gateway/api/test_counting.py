"""What is counted of answers: tokens once, to model and tenant; times only of those that are complete."""

from __future__ import annotations

import time

from gateway.api.schemas import parse_completion
from gateway.api.usage import UsageTotals, count_answer
from gateway.metrics import GatewayMetrics
from shared.messages import Usage


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
