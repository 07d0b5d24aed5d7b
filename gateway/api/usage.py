"""Token counts of an answer of several sequences, as usage reports them."""

from __future__ import annotations

from typing import Any

from shared.messages import Usage


class UsageTotals:
    """Adds up the usage of `num_prompts * n` sequences, in which each prompt was computed for `n` choices.

    Attributes:
        reasoning_tokens: Generated tokens of all choices that were reasoning; added by who reads the text.
    """

    def __init__(self, num_sequences: int, n: int) -> None:
        """Expect one usage per sequence."""
        self._usages: list[Usage | None] = [None] * num_sequences
        self._n = n
        self.reasoning_tokens = 0

    def add(self, index: int, usage: Usage | None) -> None:
        """Note the usage of the sequence of choice `index`; None if it is not known."""
        self._usages[index] = usage

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens, each prompt counted once whatever its number of choices."""
        return sum(usage.prompt_tokens for usage in self._usages[:: self._n] if usage)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that needed no computation, as the first choice of each prompt saw it."""
        return sum(usage.cached_tokens for usage in self._usages[:: self._n] if usage)

    @property
    def completion_tokens(self) -> int:
        """Generated tokens of all choices."""
        return sum(usage.completion_tokens for usage in self._usages if usage)

    @property
    def longest_completion(self) -> int:
        """Generated tokens of the longest choice."""
        return max((usage.completion_tokens for usage in self._usages if usage), default=0)

    @property
    def accepted_prediction_tokens(self) -> int:
        """Generated tokens that were accepted drafts of speculative decoding."""
        return sum(usage.accepted_prediction_tokens for usage in self._usages if usage)

    @property
    def rejected_prediction_tokens(self) -> int:
        """Draft tokens of speculative decoding that were not accepted."""
        return sum(usage.rejected_prediction_tokens for usage in self._usages if usage)


def usage_fields(totals: UsageTotals) -> dict[str, Any]:
    """Return the `usage` object. It counts draft tokens and reasoning only where there were any."""
    prompt_tokens, completion_tokens = totals.prompt_tokens, totals.completion_tokens
    fields: dict[str, Any] = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": totals.cached_tokens},
    }
    details: dict[str, int] = {}
    accepted, rejected = totals.accepted_prediction_tokens, totals.rejected_prediction_tokens
    if accepted or rejected:
        details |= {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": rejected}
    if totals.reasoning_tokens:
        details["reasoning_tokens"] = totals.reasoning_tokens
    if details:
        fields["completion_tokens_details"] = details
    return fields
