"""Counts what happens to sequences: how they end, the time of their phases, moves, gaps between tokens, quarantine."""

from __future__ import annotations

import asyncio
from typing import Literal

from gateway.dispatch.inflight import Flight
from gateway.metrics import GatewayMetrics
from shared.dead_letters import DeadReason
from shared.messages import Finish

Ending = Literal["completed", "failed", "cancelled"]

# vLLM's words for the ends that are no finish reason of the model.
_FINISHED_REASONS: dict[str, str] = {"cancelled": "abort", "failed": "error"}


class DispatchCounts:
    """What the dispatcher and its parts report to."""

    def __init__(self, metrics: GatewayMetrics) -> None:
        """Count in `metrics`."""
        self._metrics = metrics
        self._loop = asyncio.get_running_loop()
        self.gap = metrics.by_model.gap

    def ended(self, flight: Flight, ending: Ending, finish: Finish | None) -> None:
        """Count an end; `finish` is what the worker of a complete sequence says of it."""
        self._metrics.sequences[ending] += 1
        reason = _FINISHED_REASONS.get(ending) or ("stop" if finish is None else finish.reason)
        usage, timing = (None, None) if finish is None else (finish.usage, finish.timing)
        total_s = self._loop.time() - flight.submitted_at
        self._metrics.by_model.model(flight.request.model).sequence_ended(reason, total_s, usage, timing)

    def moved(self, reason: str) -> None:
        """Count a sequence that is dispatched again."""
        self._metrics.redispatches[reason] += 1

    def quarantined(self, reason: DeadReason) -> None:
        """Count a request that is put into quarantine."""
        self._metrics.dead_letters[reason] += 1
