"""Token counts of an answer of several sequences, as answers report them and as metrics count them."""

from __future__ import annotations

import time
from dataclasses import dataclass

from gateway.generation import Generation
from gateway.metrics import GatewayMetrics
from shared.messages import Usage


@dataclass(slots=True)
class UsageTotals:
    """Adds up the usage of the sequences of an answer, in which each prompt was computed for `n` choices.

    Attributes:
        prompt_tokens: Each prompt counted once whatever its number of choices.
        cached_tokens: Prompt tokens that needed no computation, as the first choice of each prompt saw it.
        longest_completion: Generated tokens of the longest choice.
        accepted_prediction_tokens, rejected_prediction_tokens: Draft tokens of speculative decoding.
        reasoning_tokens: Generated tokens that were reasoning; added by who reads the text.
        evicted_tokens: Tokens that the model had forgotten at the end of each choice.
        evicted_by: The policy by which it did; empty where it had forgotten none.
    """

    n: int
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    longest_completion: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0
    reasoning_tokens: int = 0
    evicted_tokens: int = 0
    evicted_by: str = ""

    @property
    def is_known(self) -> bool:
        """Whether any sequence has told its usage, which it does when it ends."""
        return self.prompt_tokens + self.completion_tokens > 0

    def add(self, index: int, usage: Usage | None) -> None:
        """Add the usage of the sequence of choice `index`, once; None if it is not known."""
        if usage is None:
            return
        if index % self.n == 0:
            self.prompt_tokens += usage.prompt_tokens
            self.cached_tokens += usage.cached_tokens
        self.completion_tokens += usage.completion_tokens
        self.longest_completion = max(self.longest_completion, usage.completion_tokens)
        self.accepted_prediction_tokens += usage.accepted_prediction_tokens
        self.rejected_prediction_tokens += usage.rejected_prediction_tokens
        self.evicted_tokens += usage.evicted_tokens
        self.evicted_by = usage.evicted_by or self.evicted_by

    def count_delivered(self, prompt_tokens: int, completion_tokens: int) -> None:
        """Count the tokens of all choices that were delivered when the answer was broken off, finished ones too."""
        self.prompt_tokens = max(self.prompt_tokens, prompt_tokens)
        self.completion_tokens = max(self.completion_tokens, completion_tokens)


def count_answer(
    metrics: GatewayMetrics,
    generation: Generation,
    tenant: str,
    usage: UsageTotals,
    started: float,
    *,
    is_complete: bool,
) -> None:
    """Count an answer which ends now. `started` is `time.perf_counter()` when its request had arrived."""
    prompt_tokens, cached_tokens = usage.prompt_tokens, usage.cached_tokens
    completion_tokens = usage.completion_tokens
    metrics.prompt_tokens += prompt_tokens
    metrics.cached_prompt_tokens += cached_tokens
    metrics.completion_tokens += completion_tokens
    use = metrics.by_model.tenant(generation.model, tenant)
    use.requests += 1
    use.prompt_tokens += prompt_tokens
    use.cached_tokens += cached_tokens
    use.completion_tokens += completion_tokens
    metrics.usage.add(
        tenant,
        generation.model,
        prompt_tokens=prompt_tokens,
        cached_tokens=cached_tokens,
        completion_tokens=completion_tokens,
    )
    measures = metrics.by_model.models[generation.model]
    measures.choices.observe(generation.num_choices)
    if generation.sampling.max_tokens is not None:
        measures.max_tokens.observe(generation.sampling.max_tokens)
    if is_complete:
        measures.e2e_s.observe(time.perf_counter() - started)
        measures.longest_outputs.observe(usage.longest_completion)
