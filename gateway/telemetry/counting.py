"""From what happens to what is counted: one place for everything that is counted when a sequence or an answer ends."""

from __future__ import annotations

import asyncio
import time

from gateway.api.usage import UsageTotals
from gateway.dispatch.dispatcher import Dispatcher, Ending
from gateway.dispatch.inflight import Flight
from gateway.generation import Generation
from gateway.metrics import GatewayMetrics
from shared.messages import Finish

# vLLM's words for the ends that are no finish reason of the model.
_FINISHED_REASONS: dict[str, str] = {"cancelled": "abort", "failed": "error"}


def count_dispatches(dispatcher: Dispatcher, metrics: GatewayMetrics) -> None:
    """Count in `metrics` what `dispatcher` tells from now on. Call it on the event loop."""
    now = asyncio.get_running_loop().time

    def end(flight: Flight, ending: Ending, finish: Finish | None) -> None:
        metrics.sequences[ending] += 1
        reason = _FINISHED_REASONS.get(ending) or ("stop" if finish is None else finish.reason)
        usage, timing = (None, None) if finish is None else (finish.usage, finish.timing)
        total_s = now() - flight.submitted_at
        metrics.by_model.model(flight.request.model).sequence_ended(reason, total_s, usage, timing)

    def move(reason: str) -> None:
        metrics.redispatches[reason] += 1

    def quarantine(reason: str) -> None:
        metrics.dead_letters[reason] += 1

    dispatcher.on_end = end
    dispatcher.count_moves(move)
    dispatcher.count_gaps(metrics.by_model.gap)
    dispatcher.count_quarantined(quarantine)


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
    measures.choices.observe(generation.n)
    if generation.sampling.max_tokens is not None:
        measures.max_tokens.observe(generation.sampling.max_tokens)
    if is_complete:
        measures.e2e_s.observe(time.perf_counter() - started)
        measures.longest_outputs.observe(usage.longest_completion)
