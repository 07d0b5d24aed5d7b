"""Token counts of answers of several prompts and choices."""

from __future__ import annotations

from gateway.api.usage import UsageTotals, usage_fields
from shared.messages import Usage


def test_prompts_count_once_and_choices_each() -> None:
    totals = UsageTotals(2)
    for index, usage in enumerate((Usage(10, 1, 4), Usage(10, 2, 9), Usage(20, 3, 5), Usage(20, 40, 9))):
        totals.add(index, usage)
    assert (totals.prompt_tokens, totals.cached_tokens, totals.completion_tokens) == (30, 9, 46)
    assert totals.longest_completion == 40
    assert usage_fields(totals) == {
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
    def details(usage: Usage, reasoning: int) -> object:
        totals = UsageTotals(2)
        totals.add(0, usage)
        totals.add(1, usage)
        totals.reasoning_tokens = reasoning
        return usage_fields(totals).get("completion_tokens_details")

    assert details(Usage(5, 3), 0) is None
    assert details(Usage(5, 3), 2) == {"reasoning_tokens": 2}
    drafts = {"accepted_prediction_tokens": 2, "rejected_prediction_tokens": 0}
    assert details(Usage(5, 3, 0, 1, 0), 0) == drafts
    assert details(Usage(5, 3, 0, 0, 2), 1) == {
        "accepted_prediction_tokens": 0,
        "rejected_prediction_tokens": 4,
        "reasoning_tokens": 1,
    }
