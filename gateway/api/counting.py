"""Counts an answer when it ends: its tokens, whose they were, and how long it took."""

from __future__ import annotations

import time

from gateway.api.usage import UsageTotals
from gateway.generation import Generation
from gateway.metrics import GatewayMetrics


def count_answer(
    metrics: GatewayMetrics,
    generation: Generation,
    tenant: str,
    usage: UsageTotals,
    started: float,
    *,
    is_complete: bool,
) -> None:
    """Count an answer, complete or not, which ends now.

    Args:
        metrics: Where.
        generation: What was asked for.
        tenant: Whose request it was.
        usage: Its tokens.
        started: `time.perf_counter()` when the request had arrived.
        is_complete: It has all that was asked for.
    """
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
    measures = metrics.by_model.model(generation.model)
    measures.choices.observe(generation.num_choices)
    if generation.sampling.max_tokens is not None:
        measures.max_tokens.observe(generation.sampling.max_tokens)
    if is_complete:
        measures.e2e_s.observe(time.perf_counter() - started)
        measures.longest_outputs.observe(usage.longest_completion)
