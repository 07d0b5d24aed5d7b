"""Counts what happens to sequences: how they end, the time of their phases, moves, gaps between tokens, quarantine."""

from __future__ import annotations

import asyncio

from gateway.dispatch.dispatcher import Dispatcher, Ending
from gateway.dispatch.inflight import Flight
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
