"""What goes on now: workers, queues, refusals and counts, made at most once a second however many look."""

from __future__ import annotations

import time
from typing import Any

from msgspec.structs import asdict

from gateway.dispatch.dispatcher import Dispatcher
from gateway.metrics import GatewayMetrics
from gateway.timelines.exchange import TimelineExchange
from shared.messages import Heartbeat
from shared.timeline import GatewayCounts
from shared.worker_metrics import WorkerMetrics

FRESH_S = 1.0
MAX_WORKERS = 256
_LOAD = ("model", "num_workers", "running", "queued_requests", "queued_tokens", "prefill_rate", "decode_rate")
_BEAT = (
    "worker",
    "pid",
    "model",
    "running",
    "waiting",
    "waiting_tokens",
    "free_blocks",
    "total_blocks",
    "max_num_seqs",
)
_COUNTS = ("prompt_tokens", "prefix_hits", "prefill_tokens", "generation_tokens", "preemptions", "failed_steps")
_BATCH = ("running_batch", "waiting_batch", "batch_pending", "batch_oldest_s", "resident_bytes", "dead_letters")
_NOTHING = WorkerMetrics()


def own_counts(gateway: str, dispatcher: Dispatcher, metrics: GatewayMetrics) -> GatewayCounts:
    """Return what this process counts."""
    return GatewayCounts(
        gateway=gateway,
        streams=metrics.active_streams,
        completion_tokens=metrics.completion_tokens,
        prompt_tokens=metrics.prompt_tokens,
        unclaimed=dispatcher.num_unclaimed(),
        shed=dict(metrics.shed),
        limited=dict(metrics.limited),
        moves=dict(metrics.redispatches),
        sequences=dict(metrics.sequences),
        cpu_s=time.process_time(),
    )


class NowView:
    """Reads the fleet and the counts of all gateways."""

    def __init__(self, dispatcher: Dispatcher, exchange: TimelineExchange) -> None:
        self._dispatcher = dispatcher
        self._exchange = exchange
        self._made_at = float("-inf")
        self._view: dict[str, Any] = {}

    async def view(self) -> dict[str, Any]:
        """Return the state of the last second. Counts grow from the start of their process."""
        if time.monotonic() - self._made_at >= FRESH_S:
            # Before it is made: others who ask meanwhile get the last one.
            self._made_at = time.monotonic()
            self._view = await self._make()
        return self._view or await self._make()

    async def _make(self) -> dict[str, Any]:
        fleet = self._dispatcher.fleet
        loads = [load for model in fleet.models() if (load := fleet.load(model)) is not None]
        beats, oldest = fleet.workers(), self._dispatcher.oldest_unclaimed_s()
        counts = await self._exchange.counts()
        queues = []
        for load in loads:
            own = [beat.metrics or _NOTHING for beat in beats if beat.model == load.model]
            jobs = sum(each.waiting_batch for each in own) + max((each.batch_pending for each in own), default=0)
            age_s = max((each.batch_oldest_s for each in own), default=0.0)
            waiting, waited_s = load.queued_requests, oldest.get(load.model, 0.0)
            queues.append({"model": load.model, "lane": "interactive", "waiting": waiting, "oldest_s": waited_s})
            queues.append({"model": load.model, "lane": "batch", "waiting": jobs, "oldest_s": age_s})
        return {
            "at": time.time(),
            "models": [{name: getattr(load, name) for name in _LOAD} for load in loads],
            "queues": queues,
            "workers": [_worker(beat) for beat in beats[:MAX_WORKERS]],
            "num_workers": len(beats),
            "hosts": fleet.hosted.shown(),
            "gateways": [asdict(each) for each in counts],
        }


def _worker(beat: Heartbeat) -> dict[str, Any]:
    metrics = beat.metrics or _NOTHING
    told: dict[str, Any] = {name: getattr(beat, name) for name in _BEAT}
    told |= {name: getattr(metrics, name) for name in (*_COUNTS, *_BATCH)}
    steps = metrics.step_seconds
    told["busy_s"] = 0.0 if steps is None else steps.total
    told["max_num_seqs"] = beat.max_num_seqs
    told["draining"] = beat.draining
    told["started"] = beat.started
    told["golden"] = None if metrics.golden is None else asdict(metrics.golden)
    told["gpus"] = [asdict(gpu) for gpu in metrics.gpus]
    return told
