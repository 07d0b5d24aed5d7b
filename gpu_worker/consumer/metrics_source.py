"""Collects what the parts of a worker count, for the heartbeat to carry to the gateways."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from gpu_worker.consumer.batch_lane import BatchLane
from gpu_worker.consumer.batch_queues import BatchQueues
from gpu_worker.consumer.gpu_monitor import GpuMonitor
from gpu_worker.consumer.interactive_queues import InteractiveQueues
from gpu_worker.engine.engine_thread import EngineThread
from shared.histogram import Histogram
from shared.process_usage import cpu_seconds, resident_bytes
from shared.worker_metrics import HistogramCounts, KvGroup, WorkerMetrics

if TYPE_CHECKING:
    from gpu_worker.layers.expert_loads import ExpertLoads

# Heartbeats are more frequent than anybody looks at metrics.
REFRESH_S = 0.5


class MetricsSource:
    """Reads the counts of engine, queues and process. Keeps the last reading for a moment; counts nothing itself."""

    def __init__(
        self,
        engine: EngineThread,
        interactive: InteractiveQueues,
        batch: BatchQueues,
        lane: BatchLane,
        gpu: GpuMonitor,
        experts: ExpertLoads | None = None,
    ) -> None:
        """Read these."""
        self._engine = engine
        self._interactive = interactive
        self._batch = batch
        self._lane = lane
        self._gpu = gpu
        self._experts = experts
        self._expert_load = None if experts is None else experts.read()
        self._metrics: WorkerMetrics | None = None
        self._read_at = 0.0

    def metrics(self) -> WorkerMetrics:
        """Return the counts, at most `REFRESH_S` old."""
        now = time.monotonic()
        if self._metrics is None or now - self._read_at >= REFRESH_S:
            self._metrics, self._read_at = self._read(), now
        return self._metrics

    async def refresh(self) -> None:
        """Read what waits for a device, in a thread: the GPU's sensors, and how tokens fall on experts."""
        await self._gpu.refresh()
        if self._experts is not None:
            self._expert_load = await asyncio.to_thread(self._experts.read)

    def _read(self) -> WorkerMetrics:
        stats, counts, batch = self._engine.stats, self._engine.counts, self._batch
        experts = self._expert_load
        return WorkerMetrics(
            prompt_tokens=stats.num_prefix_queries,
            prefix_hits=stats.num_prefix_hits,
            prefill_tokens=counts.num_prefilled,
            generation_tokens=counts.num_generated,
            preemptions=stats.num_preemptions,
            failed_steps=stats.num_failed_steps,
            step_tokens=_counts(counts.step_tokens),
            step_seconds=_counts(counts.step_seconds),
            running_batch=stats.running_batch,
            waiting_batch=stats.waiting_batch,
            batch_pending=batch.backlog,
            batch_oldest_s=batch.oldest_s,
            redelivered_interactive=self._interactive.num_redelivered,
            redelivered_batch=batch.num_redelivered,
            dead_letters=self._lane.num_dead_letters,
            cpu_seconds=cpu_seconds(),
            resident_bytes=resident_bytes(),
            gpus=self._gpu.readings,
            kv_groups=tuple(KvGroup(*group) for group in stats.groups),
            expert_tokens=0 if experts is None else experts.tokens,
            expert_imbalance=0.0 if experts is None else experts.imbalance,
            unused_experts=0 if experts is None else experts.unused,
            evicted_blocks=stats.num_evicted_blocks,
        )


def _counts(histogram: Histogram) -> HistogramCounts:
    return HistogramCounts(tuple(histogram.counts), histogram.total)
